/** The list of streams: which there are, which one is shown, and what can be done with it. */
import { Stream } from "./stream.js";
import { part } from "./side.js";

export class Streams {
  /** @type {Stream[]} */
  all = [];
  /** @type {Stream | null} */
  current = null;

  /**
   * @param {import("./back-end.d.ts").BackEnd} backEnd
   * @param {(stream: Stream) => Promise<void>} show
   */
  constructor(backEnd, show) {
    this.backEnd = backEnd;
    this.show = show;
  }

  /** Lists the streams that exist; shows the latest one whose text this tab remembers, and returns if any. */
  async restore() {
    const found = await this.backEnd.list();
    for (const each of found)
      this.all.push(await Stream.of(this.backEnd, each, `Text ${each.handle.id.slice(-4)}`));
    const known = this.all.filter(({ ids }) => ids.length).at(-1);
    if (known) await this.choose(known);
    return Boolean(known);
  }

  async create() {
    await this.#add(new Stream(this.backEnd, await this.backEnd.start(), { name: this.#unused() }));
  }

  async fork() {
    await this.#add(await this.#shown.inTurn(() => this.#shown.fork(this.#unused())));
  }

  /** @param {Uint8Array} file */
  async load(file) {
    await this.#add(await Stream.of(this.backEnd, await this.backEnd.load(file), this.#unused()));
  }

  /** Asks for another name of the shown stream; returns whether one was given. */
  rename() {
    const name = prompt("A name for this text:", this.#shown.name)?.trim().slice(0, 60);
    if (name) this.#shown.name = name;
    this.changed();
    return Boolean(name);
  }

  async delete() {
    const stream = this.#shown;
    const tokens = stream.position.toLocaleString("en");
    if (!confirm(`Delete ${stream.name}, with its ${tokens} tokens? It cannot be brought back.`)) return;
    await stream.inTurn(() => stream.handle.dispose());
    this.all = this.all.filter((each) => each !== stream);
    const next = this.all.at(-1);
    if (next) await this.choose(next);
    else await this.create();
  }

  /** @param {Stream} stream */
  async choose(stream) {
    this.current = stream;
    await this.show(stream);
    this.changed();
    const list = part("streams");
    const [box, frame] = [part("streams").querySelector("[aria-current=true]") ?? list, list].map((each) =>
      each.getBoundingClientRect(),
    );
    list.scrollTop += Math.min(0, box.top - frame.top) + Math.max(0, box.bottom - frame.bottom);
  }

  /** The shown stream has changed: remembers its text, and shows the list again. */
  changed() {
    const { backEnd, current } = this;
    if (current?.ids.length) backEnd.remember?.(current.handle, current.note());
    const focused = [...part("streams").children].findIndex((item) => item.contains(document.activeElement));
    const { scrollTop } = part("streams");
    part("streams").replaceChildren(...this.all.map((stream) => this.#item(stream)));
    part("streams").scrollTop = scrollTop;
    if (focused >= 0) /** @type {any} */ (part("streams").children[focused]?.firstElementChild)?.focus();
  }

  /** The shown stream has advanced: only its position has changed. */
  advanced() {
    const small = part("streams").querySelector("[aria-current=true] small");
    if (small && this.current) small.textContent = this.current.position.toLocaleString("en");
  }

  get #shown() {
    return /** @type {Stream} */ (this.current);
  }

  /** @param {Stream} stream */
  async #add(stream) {
    this.all.push(stream);
    await this.choose(stream);
  }

  /** A name that no stream has. */
  #unused() {
    let number = this.all.length + 1;
    while (this.all.some(({ name }) => name === `Text ${number}`)) number++;
    return `Text ${number}`;
  }

  /** @param {Stream} stream */
  #item(stream) {
    const [item, button, name, position] = ["li", "button", "span", "small"].map((tag) =>
      document.createElement(tag),
    );
    name.textContent = stream.name;
    if (stream.parent) {
      const parent = document.createElement("small");
      parent.textContent = `from ${stream.parent}`;
      name.append(parent);
    }
    position.textContent = stream.position.toLocaleString("en");
    button.setAttribute("type", "button");
    button.setAttribute("aria-current", String(stream === this.current));
    button.append(name, position);
    button.addEventListener("click", () => this.choose(stream));
    item.append(button);
    return item;
  }
}
