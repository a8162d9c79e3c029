// OpenAI's client for Node.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.BASE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "What is grep?" }];
const asked = { model, messages, temperature: 0, max_tokens: 24 };

const text = (await client.chat.completions.create(asked)).choices[0].message.content;
assert(text);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
  streamed += chunk.choices[0]?.delta.content ?? "";
assert.equal(streamed, text);

const input = { model, input: "What is grep?", temperature: 0, max_output_tokens: 24 };
assert.equal((await client.responses.create(input)).output_text, text);
streamed = "";
for await (const event of await client.responses.create({ ...input, stream: true }))
  if (event.type === "response.output_text.delta") streamed += event.delta;
assert.equal(streamed, text);

const begun = await client.chat.completions.create({ ...asked, max_tokens: 2000, stream: true });
for await (const _ of begun) { begun.controller.abort(); break; }
assert.equal((await client.chat.completions.create(asked)).choices[0].message.content, text);

const schema = JSON.parse(readFileSync(process.env.WANTED));
const show = object => console.log("object:", JSON.stringify(object));
const typed = { model, messages, seed: 5, max_tokens: 300 };
const format = { type: "json_schema", json_schema: { name: "command", strict: true, schema } };
show(JSON.parse((await client.chat.completions.create({ ...typed, response_format: format })).choices[0].message.content));
const tools = [{ type: "function", function: { name: "command", strict: true, parameters: schema } }];
const forced = { tools, tool_choice: "required", parallel_tool_calls: false };
const parsed = (await client.chat.completions.parse({ ...typed, ...forced })).choices[0].message.tool_calls[0];
show(parsed.function.parsed_arguments);
const stream = client.chat.completions.stream({ ...typed, ...forced });
show(JSON.parse((await stream.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments));
const text_format = { format: { type: "json_schema", name: "command", strict: true, schema } };
const response = await client.responses.parse({ model, input: "What is grep?", seed: 5, max_output_tokens: 300, text: text_format });
show(JSON.parse(response.output_text));
