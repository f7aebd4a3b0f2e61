/** The page of `xl-export serve`: one stream at a time, of those that live on the server. */
import { Client, Refusal } from "./client.js";
import { showServer } from "./server-view.js";
import { TextView, tokensIn } from "./text.js";
import { inBytes } from "./tokens.js";

const LIKELIEST = 4; // tokens that are shown beside each one
const EVERY = 1000; // milliseconds between two looks at the server
const KEPT = "xl-export text "; // of each stream, with its position, in the storage of this tab
const MOST_KEPT = 2000; // tokens
const KEPT_STREAMS =
  "“Save…” writes a file that goes on wherever this model is served with the same key file.";
const PASSING_STREAMS =
  "Streams and saved files last until this server stops. Start it with --state FOLDER to keep them.";

/** @param {string} id @returns {any} */
const part = (id) => document.getElementById(id);

class Page {
  constructor() {
    this.client = new Client();
    this.view = new TextView({
      text: part("text"),
      scroll: part("scroll"),
      token: part("token"),
      earlier: part("earlier"),
    });
    /** @type {any} the stream that is shown, as the server tells it */
    this.stream = null;
    /** @type {any[]} */
    this.streams = [];
    /** @type {any[]} */
    this.models = [];
    /** @type {string | null} the model whose sampling the sliders began with */
    this.chosen = null;
    this.running = false;
    this.away = false; // whether the error that is shown is of `look`
    this.busy = Promise.resolve(); // operations come one after the other
    this.view.onchoose = () => this.buttons();
    this.#listen();
  }

  #listen() {
    const does = (/** @type {string} */ id, /** @type {() => any} */ act) =>
      part(id).addEventListener("click", () => this.inTurn(act));
    part("go").addEventListener("click", () => (this.running ? this.stop() : this.inTurn(() => this.go())));
    does("fork", () => this.fork());
    does("back", () => this.back());
    does("new", () => this.create());
    does("delete", () => this.delete());
    does("save", () => this.save());
    part("load").addEventListener("click", () => part("file").click());
    part("file").addEventListener("change", () => this.inTurn(() => this.load()));
    part("model").addEventListener("change", () => this.inTurn(() => this.chooseModel()));
    part("typing").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.inTurn(() => this.append());
    });
    part("typed").addEventListener("input", () => this.buttons());
    part("key-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.client.setKey(part("key").value);
      this.inTurn(() => this.begin());
    });
    document.addEventListener("keydown", (event) => this.#key(event));
    for (const id of ["temperature", "top-p"]) {
      const show = () => (part(`${id}-value`).textContent = Number(part(id).value).toFixed(2));
      part(id).addEventListener("input", show);
      show();
    }
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.isComposing) return; // Enter ends what an input method composes
    if (event.key === "Escape" && this.running) this.stop();
    else if (event.key === "Enter" && event.ctrlKey && !this.running) this.inTurn(() => this.go());
    else if (event.key === "Enter" && !event.shiftKey && event.target === part("typed"))
      part("typing").requestSubmit();
    else if (event.key === "Backspace" && event.altKey) this.inTurn(() => this.back());
    else return;
    event.preventDefault();
  }

  /** Does something after what was asked before it; an error becomes a sentence. @param {() => any} act */
  inTurn(act) {
    this.busy = this.busy.then(async () => {
      try {
        part("error").hidden = true;
        part("why").hidden = true;
        await act();
      } catch (error) {
        this.fail(error);
        this.away = false;
      }
      this.buttons();
    });
    return this.busy;
  }

  /** @param {any} error */
  fail(error) {
    if (!(error instanceof Refusal)) console.error(error);
    part("key-form").hidden = error.status !== 401;
    if (part("error").textContent !== error.message) part("error").textContent = error.message;
    part("error").hidden = false;
  }

  /** Shows the models and the streams of this client. */
  async begin() {
    this.models = (await this.client.json("v1/models")).data;
    const model = part("model");
    model.replaceChildren(...this.models.map(({ id }) => new Option(id, id)));
    part("key-form").hidden = true;
    await this.chooseModel();
    clearInterval(this.timer);
    this.timer = setInterval(() => this.look(), EVERY);
    await this.look();
  }

  async chooseModel() {
    const model = this.models.find(({ id }) => id === part("model").value);
    const told = model.xl_export;
    if (model.id !== this.chosen) {
      const { temperature = 1, top_p: topP = 1 } = told.sampling;
      for (const [id, value] of Object.entries({ temperature, "top-p": topP })) {
        part(id).value = String(value);
        part(id).dispatchEvent(new Event("input"));
      }
      this.chosen = model.id;
    }
    part("facts").textContent =
      `memory ${told.mem_len}, segment ${told.segment}, ` +
      `${told.vocabulary.size.toLocaleString("en")} tokens (${told.vocabulary.kind}), ` +
      `${inBytes(told.bytes_per_stream)} a stream`;
    await this.list();
    const [first] = this.streams.slice(-1);
    if (first) await this.open(first);
    else await this.create();
  }

  async list() {
    const model = part("model").value;
    this.streams = (await this.client.json(`v1/streams?model=${encodeURIComponent(model)}`)).data;
    this.#showList();
  }

  #showList() {
    const items = this.streams.map((stream, i) => {
      const [item, button, name, small] = ["li", "button", "span", "small"].map((tag) =>
        document.createElement(tag),
      );
      const current = stream.id === this.stream?.id;
      name.textContent = `Stream ${i + 1}`;
      small.textContent = place(stream);
      button.setAttribute("type", "button");
      button.setAttribute("aria-current", String(current));
      button.title = stream.id;
      button.append(name, small);
      button.addEventListener("click", () => this.inTurn(() => this.open(stream)));
      item.append(button);
      return item;
    });
    const focused = document.activeElement?.closest("#streams button")?.getAttribute("title");
    const { scrollTop } = part("streams");
    part("streams").replaceChildren(...items);
    part("streams").scrollTop = scrollTop;
    if (focused) items.find((item) => item.firstElementChild.title === focused)?.firstElementChild.focus();
  }

  /** Shows a stream. @param {any} stream */
  async open(stream) {
    await this.client.open(stream.id);
    const facts = await this.client.ask("facts");
    this.stream = { ...stream, ...facts };
    this.view.show(kept(stream.id, facts.position), facts.position);
    this.#at(facts, facts.position);
    this.#showList();
    this.#reveal();
  }

  /** Brings the chosen stream into view in its list; the page itself stays where it is. */
  #reveal() {
    const list = part("streams");
    const [box, frame] = [list.querySelector("[aria-current=true]") ?? list, list].map((each) =>
      each.getBoundingClientRect(),
    );
    list.scrollTop += Math.min(0, box.top - frame.top) + Math.max(0, box.bottom - frame.bottom);
  }

  async create() {
    const answer = await this.client.json("v1/streams", {
      method: "POST",
      json: { model: part("model").value },
    });
    await this.list();
    await this.open(answer.stream);
    part("typed").focus();
  }

  async delete() {
    const { id, position } = this.stream;
    const tokens = position.toLocaleString("en");
    if (!confirm(`Delete this stream of ${tokens} tokens? It cannot be brought back.`)) return;
    this.client.close();
    await this.client.json(`v1/streams/${id}`, { method: "DELETE" });
    sessionStorage.removeItem(KEPT + id);
    this.stream = null;
    await this.chooseModel();
  }

  async fork() {
    const fork = await this.client.ask("fork");
    keep(fork.id, this.view.position, this.view.tokens);
    await this.list();
    await this.open(fork);
    this.say(`This is a fork, at position ${fork.position}.`);
  }

  /** Appends what was typed. */
  async append() {
    const text = part("typed").value;
    if (!text) return;
    const answer = await this.client.ask("append", { text, alternatives: LIKELIEST });
    untype(text);
    this.#done(answer);
    this.say(`${answer.tokens.length} tokens, ${answer.total_bits.toFixed(1)} bits.`);
  }

  /** Appends what was typed, and lets the stream go on until it is stopped. */
  async go() {
    const text = part("typed").value;
    let unread = text; // of what was typed: until the server has read it
    const read = () => {
      untype(unread);
      unread = "";
    };
    this.#at(await this.client.ask("facts"), this.view.position);
    const begun = this.view.position;
    const count = Number(part("count").value);
    let drawn = 0;
    let frame = 0;
    /** @type {any[]} */
    let arrived = [];
    // Once a frame: a busy browser shows many tokens at once, and does not fall behind the server.
    const show = () => {
      cancelAnimationFrame(frame);
      frame = 0;
      this.view.add(arrived);
      arrived = [];
      this.#showPosition(this.view.position, ` · ${drawn} of ${count} tokens`);
    };
    this.running = true;
    this.buttons();
    try {
      const seed = part("seed").value;
      const fields = {
        ...(text ? { text } : {}),
        ...(seed ? { seed: Number(seed) } : {}),
        temperature: Number(part("temperature").value),
        top_p: Number(part("top-p").value),
        max_tokens: count,
        alternatives: LIKELIEST,
        ignore_eos: true,
      };
      const answer = await this.client.ask("continue", fields, (chunk) => {
        if (chunk.appended) read();
        arrived.push(...tokensIn(chunk));
        drawn += chunk.tokens.length - chunk.appended;
        frame ||= requestAnimationFrame(show);
      });
      read();
      drawn += answer.tokens.length - answer.appended;
      show();
      this.#done(answer, begun);
      const reason = whyEnded(answer, drawn);
      this.view.end(part("why"), reason);
      this.say(reason);
    } catch (error) {
      show();
      await this.#find(begun);
      throw error;
    } finally {
      this.running = false;
    }
  }

  stop() {
    this.client.cancel();
  }

  /** Takes back the tokens from the chosen one on, or the last one. */
  async back() {
    const { back } = this.view;
    const facts = await this.client.ask("rewind", { tokens: back });
    this.#at(facts, this.view.position - back);
  }

  async save() {
    const answer = await this.client.request(`v1/streams/${this.stream.id}/snapshot`);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = `${this.stream.id}.stream`;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  async load() {
    const [file] = part("file").files;
    part("file").value = "";
    const model = encodeURIComponent(part("model").value);
    const stream = await this.client.json(`v1/streams/restore?model=${model}`, {
      method: "POST",
      body: file,
    });
    await this.list();
    await this.open(stream);
  }

  /** @param {any} answer @param {number} [least] as `#at` has it */
  #done(answer, least) {
    this.view.add(tokensIn(answer));
    this.#at(answer.stream, this.view.position, least);
  }

  /** Asks where the stream is, after an answer that broke off; shows nothing that may be wrong. */
  async #find(least = this.view.position) {
    try {
      this.#at(await this.client.ask("facts"), this.view.position, least);
    } catch {
      // The connection has ended: whoever opens the stream again compares its position with what is kept.
    }
  }

  /**
   * The stream is there now. Where that is not the position that was expected, somebody else has moved it,
   * and the tokens that are shown are not its last ones. After a stop the last tokens may not have been fed,
   * so the position is then one from `least` on.
   * @param {any} facts @param {number} expected @param {number} [least]
   */
  #at(facts, expected, least = expected) {
    this.stream = { ...this.stream, ...facts };
    if (least <= facts.position && facts.position <= expected) this.view.move(facts.position);
    else this.view.show([], facts.position);
    keep(this.stream.id, facts.position, this.view.tokens);
    const listed = this.streams.find(({ id }) => id === facts.id);
    if (listed) Object.assign(listed, facts);
    this.#showList();
    const back = facts.rewindable === undefined ? "" : ` · up to ${facts.rewindable} can be taken back`;
    this.#showPosition(facts.position, back);
  }

  /**
   * Shows the position of the stream above its text and in the list.
   * @param {number} position @param {string} more
   */
  #showPosition(position, more) {
    part("state").textContent = `position ${position.toLocaleString("en")}${more}`;
    const listed = part("streams").querySelector("[aria-current=true] small");
    if (listed) listed.textContent = place({ ...this.stream, position });
  }

  /** What can be pressed now. */
  buttons() {
    const there = this.stream !== null;
    const { back } = this.view;
    const most = this.stream?.rewindable ?? this.view.tokens.length;
    const possible = there && !this.running && this.view.tokens.length > 0 && back <= most;
    part("go").textContent = this.running ? "Stop" : "Continue";
    part("go").classList.toggle("running", this.running);
    part("go").disabled = !there || (!this.running && !part("typed").value && this.stream.position === 0);
    part("append").disabled = !there || this.running || !part("typed").value;
    for (const id of ["fork", "delete", "save"]) part(id).disabled = !there || this.running;
    part("back").disabled = !possible;
    part("back").textContent = back > 1 ? `Take back ${back}` : "Take back";
    this.view.mark(possible);
  }

  /** Looks at the server. */
  async look() {
    if (document.hidden) return;
    try {
      const told = await this.client.json("v1/server");
      const name = part("model").value;
      const figures = told.models[name];
      if (!figures) throw new Refusal(`The server has no model ${name} any more; load the page again.`, 404);
      if (this.away) part("error").hidden = true;
      this.away = false;
      part("lasting").textContent = told.streams_survive ? KEPT_STREAMS : PASSING_STREAMS;
      showServer(figures, {
        rows: part("rows"),
        text: part("rows-text"),
        memory: part("memory"),
      });
    } catch (error) {
      this.fail(error);
      this.away = true;
    }
  }

  /** @param {string} text */
  say(text) {
    part("said").textContent = text;
  }
}

/** Where a stream is. @param {any} stream */
function place({ position, in_memory }) {
  return `${position.toLocaleString("en")} · ${in_memory ? "memory" : "disk"}`;
}

/**
 * Why a continuation ended, and what to do. The page asks for no stop string, and goes on at the end of a
 * document.
 * @param {any} answer @param {number} drawn how many tokens
 */
function whyEnded({ finish_reason: reason, error }, drawn) {
  const tokens = `${drawn.toLocaleString("en")} ${drawn === 1 ? "token" : "tokens"}`;
  if (error) return error;
  if (reason === "length") return `Stopped after ${tokens}, as set under Sampling. Press Continue for more.`;
  if (reason === "cancelled") return `You stopped it after ${tokens}. Press Continue for more.`;
  return `The server is stopping; it ended this after ${tokens}.`;
}

/** Takes away what was sent, and leaves what was typed behind it. @param {string} text */
function untype(text) {
  const typed = part("typed");
  if (text && typed.value.startsWith(text)) typed.value = typed.value.slice(text.length);
}

/**
 * The last tokens of a stream, where this tab remembers those before this position: the server keeps the
 * memory of a stream, not its text.
 * @param {string} id @param {number} position @returns {any[]}
 */
function kept(id, position) {
  try {
    const told = JSON.parse(sessionStorage.getItem(KEPT + id) ?? "null");
    return told?.position === position ? told.tokens : [];
  } catch {
    return [];
  }
}

/** @param {string} id @param {number} position @param {any[]} tokens */
function keep(id, position, tokens) {
  try {
    sessionStorage.setItem(KEPT + id, JSON.stringify({ position, tokens: tokens.slice(-MOST_KEPT) }));
  } catch {
    sessionStorage.removeItem(KEPT + id); // no room: the text is not shown again
  }
}

const page = new Page();
/** @type {any} */ (globalThis).page = page; // for tests, and for the curious
page.inTurn(() => page.begin());
