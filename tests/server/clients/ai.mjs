// npm ai with @ai-sdk/openai-compatible against a live server: prints one JSON object, which the test reads.
// Arguments: base URL, model, "fake" or "real" (a real model is also asked for structured output).
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const [url, name, kind] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "tenfold",
  baseURL: `${url}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(name);
const out = {};
const base = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

const whole = await generateText({ ...base, prompt: "@plain@" });
out.plain = whole.text;
out.finish = whole.finishReason;
out.outputTokens = whole.usage.outputTokens;

const stream = streamText({ ...base, prompt: "@plain@" });
let text = "";
for await (const part of stream.textStream) text += part;
out.streamed = text;
out.streamedTokens = (await stream.usage).outputTokens;

if (kind === "fake") {
  const inputSchema = jsonSchema({ type: "object", properties: { a: { type: "number" } }, required: ["a"] });
  const add = tool({ description: "Adds.", inputSchema });
  const called = await generateText({ ...base, prompt: "@call@", tools: { add } });
  out.call = called.toolCalls[0].input;
  out.callFinish = called.finishReason;
  const streamed = streamText({ ...base, prompt: "@call@", tools: { add } });
  await streamed.consumeStream();
  out.streamedCall = (await streamed.toolCalls)[0].input;
  const vectors = await embedMany({ model: provider.textEmbeddingModel(name), values: ["a", "b".repeat(40)] });
  out.vectors = vectors.embeddings;
  out.vectorTokens = vectors.usage.tokens;
} else {
  const schema = jsonSchema({
    type: "object",
    properties: { city: { type: "string", maxLength: 20 }, size: { type: "string", enum: ["small", "large"] } },
    required: ["city", "size"],
    additionalProperties: false,
  });
  out.structured = (await generateObject({ ...base, schema, prompt: "Name a city in France." })).object;
}

try {
  await generateText({ ...base, temperature: 9, prompt: "x" });
} catch (error) {
  out.error = { status: error.statusCode, message: error.message };
}

const abort = new AbortController();
const long = streamText({ ...base, maxOutputTokens: 2000, prompt: "Count @long@", abortSignal: abort.signal, onError() {} });
for await (const _ of long.textStream) {
  abort.abort();
  break;
}
out.cancelled = true;
console.log(JSON.stringify(out));
