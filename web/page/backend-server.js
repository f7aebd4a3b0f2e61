/** The model on a server (`xl-export serve`). */
import { Refusal } from "./stream.js";
import { NAMES_OF_TOKENS } from "./tokens.js";

const KEY = "xl-export key";
const NOTE = "xl-export text "; // of each stream, in the storage of this tab
const SHOWN_ALTERNATIVES = 4; // tokens that are shown next to each one
const MAX_KEPT_TOKENS = 5000; // tokens whose alternatives are kept
const MAX_ALTERNATIVE_TOKENS = 500; // tokens that are appended at once without alternatives

/** @param {string} key */
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** @param {{model: string | null}} options */
export async function connect({ model: wanted }) {
  const { data } = await json("v1/models");
  const models = data.filter((/** @type {any} */ each) => each.xl_export.vocabulary !== null);
  if (!models.length) {
    const { id } = data[0];
    throw new Refusal(
      `This page is for language models, and ${id} has named inputs; /v2/models/${id} lists them. Send ` +
        "them to /v1/streams/ID/step.",
    );
  }
  const model = models.find((/** @type {any} */ each) => each.id === wanted) ?? models[0];
  const backEnd = new ServerBackEnd(
    model,
    models.map((/** @type {any} */ { id }) => id),
  );
  await backEnd.readNames();
  return backEnd;
}

/**
 * The answer to a request; raises Refusal.
 * @param {string} path @param {{method?: string, body?: any, [other: string]: any}} [options]
 */
async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  /** @type {Record<string, string>} */
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (typeof options.body === "string") headers["content-type"] = "application/json";
  const answer = await fetch(path, { headers, cache: "no-store", ...options }).catch(() => {
    throw new Refusal("The server does not answer; is it running? The page tries again by itself.");
  });
  if (answer.ok) return answer;
  const { error = {} } = (await answer.json().catch(() => null)) ?? {};
  const message = error.message ?? `The server answered with status ${answer.status}.`;
  throw new Refusal(message, { status: answer.status, code: error.code });
}

/** @param {string} path @param {object} [body] of a POST */
async function json(path, body) {
  return (await request(path, body && { method: "POST", body: JSON.stringify(body) })).json();
}

class ServerBackEnd {
  /** @type {string[] | null} */
  names = null;

  /** @param {any} model of `/v1/models` @param {string[]} models */
  constructor(model, models) {
    this.model = model.id;
    this.known = model.xl_export;
    this.models = models;
  }

  async readNames() {
    const { kind, size } = this.known.vocabulary;
    if (kind !== "ids") return;
    const { prompt } = await json("detokenize", {
      model: this.model,
      tokens: Array.from({ length: size }, (_, id) => id),
    });
    const names = prompt.trim().split(/\s+/);
    this.names = names.length === size ? names : null;
  }

  describe() {
    const {
      vocabulary,
      parameters,
      bytes_per_stream: bytes,
      growing_bytes_per_token: growing,
      mem_len,
      segment,
      computed_by,
      sampling,
    } = this.known;
    const millions = parameters === null ? "" : `${(parameters / 1e6).toFixed(1)} million parameters, `;
    return {
      name: this.model,
      models: this.models,
      facts:
        `${millions}computed by ${computed_by}; memory ${mem_len}, segment ${segment}, ` +
        `vocabulary ${vocabulary.size}`,
      tokens: NAMES_OF_TOKENS[vocabulary.kind],
      trainedTokens: null,
      parameters,
      where: "on this server",
      openings: [],
      concern: null,
      special: vocabulary.special,
      names: this.names,
      bytesPerStream: bytes,
      bytesPerToken: growing ?? bytes / Math.max(1, mem_len), // a run's memory holds mem_len tokens
      sampling: sampling ?? {},
    };
  }

  /** @param {string} text */
  async tokenize(text) {
    const answer = await json("tokenize", { model: this.model, prompt: text, return_token_strs: true });
    return { ids: answer.tokens, texts: answer.token_strs };
  }

  async start() {
    return new ServerHandle(this, (await json("v1/streams", { model: this.model })).stream);
  }

  async list() {
    const { data } = await json(`v1/streams?model=${encodeURIComponent(this.model)}`);
    return data.map((/** @type {any} */ facts) => ({
      handle: new ServerHandle(this, facts),
      note: recalled(facts.id),
    }));
  }

  /** @param {Uint8Array} file */
  async load(file) {
    const path = `v1/streams/restore?model=${encodeURIComponent(this.model)}`;
    const answer = await request(path, { method: "POST", body: new Blob([/** @type {any} */ (file)]) });
    return { handle: new ServerHandle(this, await answer.json()), note: null };
  }

  /** @param {ServerHandle} handle @param {unknown} note */
  remember(handle, note) {
    try {
      sessionStorage.setItem(NOTE + handle.id, JSON.stringify(note));
    } catch {
      sessionStorage.removeItem(NOTE + handle.id); // no room: the text is not shown again
    }
  }

  /** Deletes a stream while the page is being closed. @param {ServerHandle} handle */
  forget(handle) {
    handle.dispose({ keepalive: true }).catch(() => {});
  }

  async status() {
    const { models, streams, streams_survive: lasting } = await json("v1/server");
    const metrics = models[this.model];
    if (!metrics) throw new Refusal(`The server has no model ${this.model} any more; load the page again.`);
    const { rows_decoding, rows_prompt, num_requests_waiting: waiting } = metrics;
    const kept = streams.streams;
    return {
      lines: [
        `${rows_decoding} generating, ${rows_prompt} reading, ${waiting} waiting`,
        `${kept} ${kept === 1 ? "stream" : "streams"}, ${streams.streams_in_memory} in memory`,
      ],
      note: lasting
        ? "A saved file continues wherever this model is served."
        : "Streams and saved files last until this server stops. Start it with --state FOLDER to keep them.",
    };
  }
}

class ServerHandle {
  #likeliest;
  predicts = true;
  /** @type {"end" | "length" | "stopped" | null} */
  ended = null;

  /**
   * @param {ServerBackEnd} backEnd @param {{id: string, position: number}} facts
   * @param {Map<number, any>} [likeliest] tokens at the latest positions
   */
  constructor(backEnd, { id, position }, likeliest = new Map()) {
    this.backEnd = backEnd;
    this.#likeliest = likeliest;
    this.id = id;
    this.position = position;
  }

  /** @param {number[]} ids @param {{signal?: AbortSignal}} [options] */
  async append(ids, { signal } = {}) {
    if (!ids.length) return [];
    const alternatives = ids.length > MAX_ALTERNATIVE_TOKENS ? 0 : SHOWN_ALTERNATIVES;
    const answer = await this.#ask(
      "append",
      { tokens: ids, alternatives, position: this.position },
      { signal },
    );
    return this.#tokensOf(answer).map((/** @type {any} */ { bits }) => bits);
  }

  /** @param {number[]} prompt @param {any} options */
  async *generate(prompt, { signal, ...settings }) {
    /** @type {{token: number, text: string, bits: number}[]} */
    const arrived = [];
    let count = 0; // of the tokens in `arrived` that were yielded
    let wake = () => {};
    let answer = null;
    const hear = (/** @type {any} */ chunk) => {
      arrived.push(...this.#tokensOf(chunk).slice(chunk.appended));
      wake();
    };
    const before = this.position;
    const fields = {
      ...settings,
      tokens: prompt.length ? prompt : null,
      alternatives: SHOWN_ALTERNATIVES,
      position: before,
    };
    this.ended = "stopped";
    const asked = this.#ask("continue", fields, { signal, hear }).then((end) => {
      answer = end;
      hear(end);
    });
    asked.catch(() => wake()); // it is raised below
    while (answer === null || count < arrived.length) {
      if (count < arrived.length) yield arrived[count++];
      else await Promise.race([asked, new Promise((/** @type {any} */ resolve) => (wake = resolve))]);
    }
    const { finish_reason: reason, error, stream } = /** @type {any} */ (answer);
    if (error) throw new Refusal(error);
    this.ended = reason === "end" || reason === "length" ? reason : "stopped";
    this.position = stream.position;
    // tokens that were sent and never fed, because the work was stopped: they are on the page
    const fed = stream.position - before - prompt.length;
    await this.append(arrived.slice(fed).map(({ token }) => token));
  }

  /** @param {number} count */
  async rewind(count) {
    if (count === 0) return true;
    try {
      await this.#ask("rewind", { tokens: count });
      return true;
    } catch (error) {
      if (/** @type {any} */ (error).code === "too_far_back") return false;
      throw error;
    }
  }

  /** Another stream takes the place of this one. */
  async restart() {
    const { id, position } = await this.backEnd.start();
    await this.dispose();
    Object.assign(this, { id, position });
  }

  async fork() {
    return new ServerHandle(this.backEnd, await this.#ask("fork"), new Map(this.#likeliest));
  }

  async save() {
    return (await request(`v1/streams/${this.id}/snapshot`)).blob();
  }

  /** @param {RequestInit} [options] */
  async dispose(options) {
    sessionStorage.removeItem(NOTE + this.id);
    await request(`v1/streams/${this.id}`, { ...options, method: "DELETE" });
  }

  /** @param {number} position */
  likeliest(position) {
    return this.#likeliest.get(position) ?? null;
  }

  /** @param {any} answer */
  #tokensOf({ tokens, texts, bits, likeliest }) {
    return tokens.map((/** @type {number} */ token, /** @type {number} */ i) => {
      if (likeliest?.[i]) this.#likeliest.set(this.position, likeliest[i]);
      this.#likeliest.delete(this.position - MAX_KEPT_TOKENS);
      this.position++;
      return { token, text: texts[i], bits: bits[i] ?? NaN };
    });
  }

  /**
   * The last answer to an operation; `hear` gets the chunks before it. An abort cancels it.
   * @param {string} op @param {any} [fields]
   * @param {{signal?: AbortSignal, hear?: (chunk: any) => void}} [options]
   */
  async #ask(op, fields = {}, { signal, hear } = {}) {
    signal?.throwIfAborted();
    const path = `v1/streams/${this.id}/`;
    let answered = false;
    const cancel = async () => {
      // The request may not have begun there yet.
      while (!answered && !(await json(`${path}cancel`, {}).catch(() => ({}))).cancelled) await pause();
    };
    signal?.addEventListener("abort", cancel);
    try {
      const body = JSON.stringify(hear ? { ...fields, stream: true } : fields);
      const sent = await request(`${path}${op}`, { method: "POST", body });
      const answer = await (hear ? lastEvent(sent, hear) : sent.json());
      if (op === "rewind") this.position = answer.position;
      return answer;
    } catch (error) {
      if (/** @type {any} */ (error).code === "cancelled") throw new DOMException("stopped", "AbortError");
      const now = await json(`v1/streams/${this.id}`).catch(() => null);
      if (now) this.position = now.position;
      throw error;
    } finally {
      answered = true;
      signal?.removeEventListener("abort", cancel);
    }
  }
}

const pause = () => new Promise((resolve) => setTimeout(resolve, 20));

/**
 * The last event of an answer in server-sent events; `hear` gets the others.
 * @param {Response} answer @param {(chunk: any) => void} hear
 */
async function lastEvent(answer, hear) {
  const reader = /** @type {any} */ (answer.body).pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let last = null;
  for (;;) {
    const { done, value } = await reader.read().catch(() => {
      throw new Refusal("The connection to the server has ended; load the page again.");
    });
    const events = (text += value ?? "").split("\n\n");
    text = events.pop() ?? "";
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return last;
      if (last !== null) hear(last);
      last = JSON.parse(data);
      if (last.error && !last.object) throw new Refusal(last.error.message, { code: last.error.code });
    }
    if (done) throw new Refusal("The connection to the server has ended; load the page again.");
  }
}

/** What this tab remembers of a stream: the server keeps its memory, not its text. @param {string} id */
function recalled(id) {
  try {
    return JSON.parse(sessionStorage.getItem(NOTE + id) ?? "null");
  } catch {
    return null;
  }
}
