// Anthropic's client for Node.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const asked = { model: process.env.MODEL, messages: [{ role: "user", content: "What is grep?" }], max_tokens: 24, temperature: 0 };
const whole = await client.messages.create(asked);
assert(whole.content[0].text);
const final = await client.messages.stream(asked).finalMessage();
assert.equal(final.content[0].text, whole.content[0].text);
