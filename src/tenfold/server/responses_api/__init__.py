"""OpenAI's Responses API: a parser of its bodies, a shape of its answers, and the responses that are kept."""
