// One conversation over a websocket, in the server's realtime dialect (serve_apps/realtime.py).
//
// Tells what happens by events: "state" (connecting, queued, live, dropped, closed), "frame" (a frame of the server's),
// "failed" ({code, message}). A socket that closes without a word is taken up again with the session's resume token,
// and the server repeats what was missed.

import { toBase64 } from "./sound.js";

const GRACE_MS = 20000; // how long a server keeps the row of a lost client
const KEPT_PIECES = 300; // of 100 ms, spoken while the connection is down
const KEY_PROTOCOL = "openai-insecure-api-key."; // a page cannot send headers with a websocket

export class Call extends EventTarget {
  state = "closed";
  session = null; // {id, token}
  heardUnit = -1; // the last unit that arrived whole

  /** `config`: max_kv_tokens, tts_enabled, as `session.init` takes them. */
  constructor({ key, prompt, config }) {
    super();
    this.key = key;
    this.init = { system_prompt: prompt || undefined, config };
    this.waiting = [];
    this.over = false;
  }

  open() {
    this.#become("connecting");
    this.#connect();
  }

  hear(pcm) {
    this.#sayOrKeep({ type: "input.append", input: { audio: toBase64(pcm) } });
  }

  interrupt() {
    this.#sayOrKeep({ type: "input.append", input: { audio: "", force_listen: true } });
  }

  ask(text, id) {
    this.#sayOrKeep({ type: "input.question", text, id });
  }

  close() {
    if (this.state === "live") this.#say({ type: "session.close", reason: "user_stop" });
    else this.#finish();
  }

  #connect() {
    const url = new URL("v1/realtime", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    url.searchParams.set("mode", "audio");
    if (this.session) {
      url.searchParams.set("session", this.session.id);
      url.searchParams.set("token", this.session.token);
      url.searchParams.set("after", this.heardUnit);
    }
    const protocols = ["map.realtime"];
    if (this.key) protocols.push(KEY_PROTOCOL + this.key);
    let socket;
    try {
      socket = new WebSocket(url, protocols);
    } catch { // a key with characters that no subprotocol may have is none of the server's
      return this.#fail({ code: "invalid_api_key", message: "" });
    }
    this.socket = socket;
    socket.onmessage = ({ data }) => socket === this.socket && this.#take(JSON.parse(data));
    socket.onclose = () => socket === this.socket && this.#lost();
  }

  #take(frame) {
    switch (frame.type) {
      case "session.queued":
      case "session.queue_update":
        this.#become("queued", frame);
        break;
      case "session.queue_done":
        this.#say({ type: "session.init", payload: this.init });
        break;
      case "session.created":
        this.session = { id: frame.session_id, token: frame.resume_token };
        this.lostAt = null;
        for (const kept of this.waiting.splice(0)) this.#say(kept);
        this.#become("live", frame);
        break;
      case "session.closed":
        this.#tell("frame", frame);
        this.#finish();
        return;
      case "error":
        this.#fail(frame.error);
        return;
      case "a2t.unit":
        if (frame.unit <= this.heardUnit) return;
        this.heardUnit = frame.unit;
        break;
    }
    this.#tell("frame", frame);
  }

  async #lost() {
    if (this.over) return;
    if (!this.session) return this.#fail(await whyRefused(this.key));
    this.lostAt ??= performance.now();
    const since = performance.now() - this.lostAt;
    if (since > GRACE_MS) return this.#fail({ code: "lost", message: "" });
    this.#become("dropped");
    this.timer = setTimeout(() => this.#connect(), Math.min(2000, 250 + since / 4));
  }

  #say(event) {
    this.socket.send(JSON.stringify(event));
  }

  #sayOrKeep(event) {
    if (this.over) return;
    if (this.state === "live") return this.#say(event);
    this.waiting.push(event);
    if (this.waiting.length > KEPT_PIECES) this.waiting.shift();
  }

  #become(state, detail = {}) {
    this.state = state;
    this.#tell("state", { ...detail, state });
  }

  #fail(error) {
    if (this.over) return;
    this.#tell("failed", error);
    this.#finish();
  }

  #finish() {
    if (this.over) return;
    this.over = true;
    clearTimeout(this.timer);
    this.socket?.close();
    this.#become("closed");
  }

  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/** A browser does not say why a websocket was refused; the same key on an ordinary request does. */
async function whyRefused(key) {
  const { error } = await get("v1/models", key);
  return error ?? { code: "full", message: "" };
}

/** JSON of the server's REST interface; what goes wrong is in `error`, as {code, message}. */
export async function get(path, key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  try {
    const answer = await fetch(new URL(path, document.baseURI), { headers, cache: "no-store" });
    const body = await answer.json();
    return answer.ok ? body : { error: body.error ?? { code: `http_${answer.status}`, message: answer.statusText } };
  } catch {
    return { error: { code: "unreachable", message: "" } };
  }
}
