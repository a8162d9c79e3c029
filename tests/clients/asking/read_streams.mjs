// Clients and parsers in Node: the text that each makes of a stream whose first token is late.
import { createRequire } from "node:module";
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";
import { createParser } from "eventsource-parser";
import OpenAI from "openai";

const require = createRequire(import.meta.url); // of the package only its parser runs outside a browser
const { getBytes, getLines, getMessages } = require("@microsoft/fetch-event-source/lib/cjs/parse.js");

const url = process.env.BASE_URL, model = process.env.MODEL;
const messages = [{ role: "user", content: "hi" }];
const asked = { model, messages, stream: true };
const ask = async () => (await fetch(`${url}/v1/chat/completions`, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(asked),
})).body;
const text = events => events.filter(each => each && each !== "[DONE]").map(each => JSON.parse(each).choices[0].delta.content ?? "").join("");
const tell = (client, text) => console.log("read:", client, text);

let events = [];
const parser = createParser({ onEvent: event => events.push(event.data), onError: error => { throw error; } });
const decoder = new TextDecoder();
for await (const part of await ask()) parser.feed(decoder.decode(part, { stream: true }));
tell("eventsource-parser", text(events));

events = [];
await getBytes(await ask(), getLines(getMessages(() => {}, () => {}, message => events.push(message.data))));
tell("fetch-event-source", text(events));

let said = "";
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
for await (const chunk of await openai.chat.completions.create(asked)) said += chunk.choices[0].delta.content ?? "";
tell("openai", said);

said = "";
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
for await (const event of await anthropic.messages.create({ ...asked, max_tokens: 50 }))
  if (event.type === "content_block_delta") said += event.delta.text;
tell("anthropic", said);

said = "";
const ai = createOpenAICompatible({ name: "kvrail", baseURL: `${url}/v1` })(model);
for await (const part of streamText({ model: ai, prompt: "hi", maxRetries: 0 }).textStream) said += part;
tell("ai", said);
