// Vercel's SDK, through OpenAI's two APIs and Anthropic's.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { generateObject, generateText, jsonSchema, streamText } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const baseURL = `${process.env.BASE_URL}/v1`, name = process.env.MODEL;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = [
  createOpenAICompatible({ name: "kvrail", baseURL })(name),
  openai.chat(name),
  openai.responses(name),
  createAnthropic({ baseURL, apiKey: "none" })(name),
];
const asked = { prompt: "What is grep?", temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const texts = [];
for (const model of models) {
  texts.push((await generateText({ ...asked, model })).text);
  let streamed = "";
  for await (const part of streamText({ ...asked, model }).textStream) streamed += part;
  texts.push(streamed);
}
assert(texts[0]);
assert(texts.every(text => text === texts[0]), JSON.stringify(texts));

const schema = jsonSchema(JSON.parse(readFileSync(process.env.WANTED)));
const typed = { prompt: "What is grep?", schema, seed: 5, temperature: 1, maxOutputTokens: 300, maxRetries: 0 };
for (const model of [createOpenAICompatible({ name: "kvrail", baseURL, supportsStructuredOutputs: true })(name), openai.chat(name), openai.responses(name)])
  console.log("object:", JSON.stringify((await generateObject({ ...typed, model })).object));
