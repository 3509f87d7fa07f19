// npm openai against a live server: prints one JSON object, which the test reads.
// Arguments: base URL, model, "fake" or "real" (a real model is also asked for structured output).
import OpenAI from "openai";

const [url, model, kind] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const out = {};
const ask = (content) => [{ role: "user", content }];
const parameters = {
  type: "object",
  properties: { a: { type: "number" } },
  required: ["a"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "add", description: "Adds.", parameters } }];
const flat = [{ type: "function", name: "add", description: "Adds.", parameters, strict: false }];

const base = { model, temperature: 0, max_tokens: 60 };
const whole = await client.chat.completions.create({ ...base, messages: ask("@plain@") });
out.plain = whole.choices[0].message.content;
out.finish = whole.choices[0].finish_reason;

let text = "";
const stream = await client.chat.completions.create({ ...base, messages: ask("@plain@"), stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
out.streamed = text;

const response = await client.responses.create({ model, temperature: 0, input: "@plain@", max_output_tokens: 60 });
out.response = response.output_text;
const events = [];
for await (const event of client.responses.stream({ model, temperature: 0, input: "@plain@", max_output_tokens: 60 }))
  events.push(event.type);
out.lastEvent = events.at(-1);

if (kind === "fake") {
  const called = await client.chat.completions.create({ ...base, max_tokens: 200, messages: ask("@call@"), tools });
  out.call = called.choices[0].message.tool_calls[0].function;
  const run = client.chat.completions.stream({ ...base, max_tokens: 200, messages: ask("@call@"), tools });
  out.streamedCall = (await run.finalMessage()).tool_calls[0].function;
  const item = await client.responses.create({ model, input: "@call@", tools: flat });
  const vectors = await client.embeddings.create({ model, input: ["a", "b".repeat(40)] });
  out.vectors = vectors.data.map((each) => each.embedding);
  out.responseCall = item.output.find((each) => each.type === "function_call").arguments;
} else {
  const schema = {
    type: "object",
    properties: { city: { type: "string", maxLength: 20 }, size: { enum: ["small", "large"] } },
    required: ["city", "size"],
    additionalProperties: false,
  };
  const format = { type: "json_schema", json_schema: { name: "city", schema } };
  const messages = ask("Name a city in France.");
  const shaped = await client.chat.completions.create({ ...base, messages, response_format: format });
  out.structured = JSON.parse(shaped.choices[0].message.content);
  const parsed = await client.responses.create({
    model, temperature: 0, input: messages, max_output_tokens: 60,
    text: { format: { type: "json_schema", name: "city", schema } },
  });
  out.structuredResponse = JSON.parse(parsed.output_text);
}

try {
  await client.chat.completions.create({ ...base, temperature: 9, messages: ask("x") });
} catch (error) {
  out.error = { status: error.status, param: error.param, kind: error.constructor.name };
}

const long = await client.chat.completions.create({ model, messages: ask("Count @long@"), max_tokens: 2000, stream: true });
for await (const _ of long) break; // leaving the loop hangs up
out.cancelled = true;
console.log(JSON.stringify(out));
