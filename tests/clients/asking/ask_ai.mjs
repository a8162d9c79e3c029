// Vercel's SDK, through OpenAI's two APIs and Anthropic's.
import assert from "node:assert";
import { generateText, streamText } from "ai";
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
