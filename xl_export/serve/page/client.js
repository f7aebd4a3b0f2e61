/** The server of this page: requests, and one WebSocket for the stream that is shown. */

/** An error that the server has explained, or that the connection to it is gone. */
export class Refusal extends Error {
  /** @param {string} message @param {number} status */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const KEY = "xl-export key";

export class Client {
  constructor() {
    this.key = sessionStorage.getItem(KEY) ?? "";
    /** @type {WebSocket | null} */
    this.socket = null;
    /** @typedef {{each: (chunk: any) => void, done: (end: any) => void, fail: (e: Error) => void}} Waiting */
    /** @type {Map<number, Waiting>} */
    this.waiting = new Map();
    this.tag = 0;
  }

  /** @param {string} key */
  setKey(key) {
    this.key = key;
    sessionStorage.setItem(KEY, key);
    this.close();
  }

  /**
   * The answer to a request; raises Refusal.
   * @param {string} path @param {{method?: string, json?: any, body?: Blob}} [options]
   * @returns {Promise<Response>}
   */
  async request(path, { method = "GET", json, body } = {}) {
    /** @type {Record<string, string>} */
    const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
    if (json !== undefined) headers["content-type"] = "application/json";
    let answer;
    try {
      const content = json === undefined ? body : JSON.stringify(json);
      answer = await fetch(path, { method, headers, body: content, cache: "no-store" });
    } catch {
      throw new Refusal("The server does not answer; is it running? The page tries again by itself.", 0);
    }
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => null);
    const message = told?.error?.message ?? `The server answered with status ${answer.status}.`;
    throw new Refusal(message, answer.status);
  }

  /** The JSON answer to a request. @param {string} path @param {any} [options] */
  async json(path, options) {
    return (await this.request(path, options)).json();
  }

  /** Connects to a stream; whatever was asked on another connection fails. @param {string} id */
  async open(id) {
    this.close();
    const protocols = this.key ? ["xl-export", `key64.${base64url(this.key)}`] : ["xl-export"];
    const address = new URL(`v1/streams/${id}/ws`, location.href);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(address, protocols);
    this.socket = socket;
    await new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onclose = () => reject(new Refusal("The server closed the connection to the stream.", 0));
    });
    socket.onmessage = (event) => this.#heard(JSON.parse(event.data));
    socket.onclose = () => this.#lost(socket);
  }

  close() {
    const socket = this.socket;
    this.socket = null;
    socket?.close();
    if (socket) this.#lost(socket);
  }

  /**
   * Does an operation on the stream, and gives its last answer. `each` gets the chunks before.
   * @param {string} op @param {any} [fields] @param {(chunk: any) => void} [each] @returns {Promise<any>}
   */
  ask(op, fields = {}, each = () => {}) {
    const tag = ++this.tag;
    return new Promise((done, fail) => {
      if (this.socket?.readyState !== WebSocket.OPEN) {
        fail(new Refusal("There is no connection to the stream; choose it again.", 0));
        return;
      }
      this.waiting.set(tag, { each, done, fail });
      this.socket.send(JSON.stringify({ op, tag, ...fields }));
    });
  }

  /** Ends what runs; its last answer comes as always. */
  cancel() {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send('{"op": "cancel"}');
  }

  /** @param {any} message */
  #heard(message) {
    const waits = this.waiting.get(message.tag);
    if (!waits) return;
    if (message.event === "chunk") {
      waits.each(message);
      return;
    }
    this.waiting.delete(message.tag);
    if (message.event === "end") waits.done(message);
    else waits.fail(new Refusal(message.error.message, 400));
  }

  /** @param {WebSocket} socket */
  #lost(socket) {
    if (this.socket && this.socket !== socket) return;
    for (const { fail } of this.waiting.values()) {
      fail(new Refusal("The connection to the stream has ended; choose the stream again.", 0));
    }
    this.waiting.clear();
  }
}

/** A text in letters that a subprotocol may have: a key may hold "/" and "=". @param {string} text */
function base64url(text) {
  const bytes = String.fromCharCode(...new TextEncoder().encode(text));
  return btoa(bytes).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}
