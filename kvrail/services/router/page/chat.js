// A box to try the model: one conversation, streamed, at this router.

import { html } from "./dom.js";
import { KEY } from "./parts.js";

const MAX_TOKENS = 256;

// The texts of a stream of server-sent events.
async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event.choices?.[0]?.delta?.content ?? "";
    }
  }
}

export class ChatBox {
  constructor(place) {
    this.section = place.closest("section");
    this.messages = [];
    this.log = html("div", { class: "chat", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.input = html("input", { id: "chat-input", "aria-label": "Message", placeholder: "Ask the model", autocomplete: "off" });
    this.button = html("button", {}, "Send");
    this.again = html("button", { type: "button" }, "New");
    this.form = html("form", {}, this.input, this.button, this.again);
    this.form.addEventListener("submit", event => {
      event.preventDefault();
      if (this.input.value.trim() && !this.button.disabled) this.send(this.input.value.trim());
    });
    this.again.addEventListener("click", () => {
      this.stop?.abort();
      this.messages = [];
      this.log.replaceChildren();
    });
    place.append(this.log, this.form);
  }

  update({ model, chat }) {
    this.model = model;
    this.section.hidden = !chat;
  }

  say(role, text) {
    const line = html("p", { class: role }, text);
    this.log.append(line);
    this.log.scrollTop = this.log.scrollHeight;
    return line;
  }

  async send(content) {
    this.input.value = "";
    this.button.disabled = true;
    this.stop = new AbortController();
    const messages = this.messages;
    messages.push({ role: "user", content });
    this.say("user", content);
    const line = this.say("assistant", "");
    try {
      const key = sessionStorage.getItem(KEY);
      const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
      const body = JSON.stringify({ model: this.model, messages, stream: true, max_tokens: MAX_TOKENS });
      const answer = await fetch("v1/chat/completions", { method: "POST", headers, body, signal: this.stop.signal });
      if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `status ${answer.status}`);
      for await (const text of texts(answer.body)) {
        line.textContent += text;
        this.log.scrollTop = this.log.scrollHeight;
      }
      messages.push({ role: "assistant", content: line.textContent });
    } catch (error) {
      messages.pop();
      if (error.name !== "AbortError") this.say("failed", error.message);
    } finally {
      this.button.disabled = false;
      this.input.focus();
    }
  }
}
