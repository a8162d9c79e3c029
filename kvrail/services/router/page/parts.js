// What several panels know: the key's place in the tab's storage, and the parts of a request's time.

export const KEY = "kvrail-api-key";

// A part's name, its colour and what it is.
export const PARTS = [
  ["frontend", "router", "validate and tokenise"],
  ["turn", "queue", "wait for a turn"],
  ["queue", "queue", "wait at the decode worker"],
  ["handshake", "wire", "handshake"],
  ["prefill_queue", "queue", "wait at the prefill worker"],
  ["prefill", "prefill", "compute the prompt"],
  ["first_token_wire", "wire", "first token crosses"],
  ["kv_wait", "wire", "wait for KV"],
  ["draft", "drafts", "draft on coarse KV"],
  ["verify", "drafts", "verify drafts"],
  ["decode", "decode", "decode"],
  ["respond", "router", "last bytes to the client"],
];
