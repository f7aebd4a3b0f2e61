/** The tokens of the stream that is shown: their texts, how surprising they were, and which one is chosen. */
import { colourOf, inBits } from "./tokens.js";

const SHOWN = 4000; // tokens; of a longer stream the beginning leaves the page

/**
 * @typedef {{id: number, text: string, bits: number | null, typed: boolean, likeliest: any[] | null}} Token
 */

export class TextView {
  /** @param {{text: HTMLElement, scroll: HTMLElement, token: HTMLElement, earlier: HTMLElement}} parts */
  constructor({ text, scroll, token, earlier }) {
    this.text = text;
    this.scroll = scroll;
    this.token = token;
    this.earlier = earlier;
    /** @type {Token[]} */
    this.tokens = [];
    this.position = 0; // of the stream: how many tokens it has been fed
    this.made = 0; // tokens that ever stood in the page; they have ids
    this.chosen = -1; // the index of a token in `tokens`
    this.onchoose = () => {};
    text.addEventListener("click", (event) => this.choose(this.#indexOf(event.target)));
    text.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Shows a stream. @param {Token[]} tokens @param {number} position */
  show(tokens, position) {
    this.tokens = [];
    this.text.replaceChildren();
    this.chosen = -1;
    this.position = position - tokens.length;
    this.add(tokens);
    this.move(position);
    this.choose(-1);
  }

  /** Adds tokens at the end. @param {Token[]} tokens */
  add(tokens) {
    const follows = this.#follows;
    const added = document.createDocumentFragment();
    for (const token of tokens) {
      const span = document.createElement("span");
      span.textContent = token.text;
      span.role = "option";
      if (!token.text.trim()) span.ariaLabel = visible(token.text); // an option needs a name that can be read
      span.id = `token-${++this.made}`;
      const colour = token.bits === null ? -1 : colourOf(token.bits);
      span.className = `${colour > 0 ? `s${colour}` : ""}${token.typed ? " typed" : ""}`.trim();
      span.setAttribute("aria-selected", "false");
      added.append(span);
      this.tokens.push(token);
    }
    this.text.append(added);
    this.position += tokens.length;
    const cut = this.tokens.length - SHOWN;
    if (cut > SHOWN / 4) this.#cut(cut);
    if (follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** Says below the text why it ends there. @param {HTMLElement} note @param {string} reason */
  end(note, reason) {
    const follows = this.#follows;
    note.textContent = reason;
    note.hidden = false;
    if (follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** Whether the end of the text is in view, and shall stay there. */
  get #follows() {
    return this.scroll.scrollTop + this.scroll.clientHeight > this.scroll.scrollHeight - 48;
  }

  /** Where the stream is now; tokens that it has not been fed are taken away. @param {number} position */
  move(position) {
    this.position = position;
    const most = Math.min(this.tokens.length, position);
    while (this.tokens.length > most) {
      this.tokens.pop();
      this.text.lastElementChild?.remove();
    }
    if (this.chosen >= this.tokens.length) this.choose(-1);
    const before = position - this.tokens.length;
    this.earlier.hidden = before === 0;
    this.earlier.textContent =
      `… ${before.toLocaleString("en")} earlier tokens are not shown here. The stream goes on from them.`;
  }

  /** How many tokens would be taken back from the chosen one on; 1 where none is chosen. */
  get back() {
    return this.chosen < 0 ? 1 : this.tokens.length - this.chosen;
  }

  /** Chooses a token and says how surprising it was. @param {number} index */
  choose(index) {
    const spans = this.text.children;
    spans[this.chosen]?.classList.remove("at");
    spans[this.chosen]?.setAttribute("aria-selected", "false");
    for (const span of this.text.querySelectorAll(".gone")) span.classList.remove("gone");
    this.chosen = index >= 0 && index < this.tokens.length ? index : -1;
    if (this.chosen < 0) {
      this.token.textContent = "\u00a0";
      this.text.removeAttribute("aria-activedescendant");
      this.onchoose();
      return;
    }
    const span = spans[this.chosen];
    span.classList.add("at");
    span.setAttribute("aria-selected", "true");
    this.text.setAttribute("aria-activedescendant", span.id);
    span.scrollIntoView({ block: "nearest" });
    this.#describe(this.tokens[this.chosen]);
    this.onchoose();
  }

  /** Shows what would be taken back. @param {boolean} possible */
  mark(possible) {
    if (!possible || this.chosen < 0) return;
    for (let i = this.chosen; i < this.tokens.length; i++) this.text.children[i].classList.add("gone");
  }

  /** @param {Token} token */
  #describe({ text, bits, likeliest }) {
    const position = (this.position - this.tokens.length + this.chosen).toLocaleString("en");
    const name = document.createElement("b");
    name.textContent = visible(text);
    const told = ` ${inBits(bits ?? Number.NaN)} · position ${position}`;
    const expected = (likeliest ?? [])
      .map((each) => `${visible(each.text)} ${Math.round(100 * 2 ** -each.bits)} %`)
      .join(", ");
    this.token.replaceChildren(name, told, expected ? ` · likeliest: ${expected}` : "");
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const last = this.tokens.length - 1;
    const at = this.chosen < 0 ? last + 1 : this.chosen;
    /** @type {Record<string, number>} */
    const to = { ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last };
    if (event.altKey || event.ctrlKey || !(event.key in to)) return;
    event.preventDefault();
    this.choose(to[event.key]);
  }

  /** @param {EventTarget | null} target */
  #indexOf(target) {
    return [...this.text.children].indexOf(/** @type {Element} */ (target));
  }

  /** The first tokens leave the page. @param {number} count */
  #cut(count) {
    this.tokens.splice(0, count);
    for (let i = 0; i < count; i++) this.text.firstElementChild?.remove();
    this.chosen = Math.max(-1, this.chosen - count);
  }
}

/** The tokens of an answer. @param {any} answer @returns {Token[]} */
export function tokensIn({ tokens, texts, bits, likeliest, appended }) {
  return tokens.map((/** @type {number} */ id, /** @type {number} */ i) => ({
    id,
    text: texts[i],
    bits: bits[i],
    typed: i < appended,
    likeliest: likeliest?.[i] ?? null,
  }));
}

/** A token with signs for what one does not see. @param {string} text */
function visible(text) {
  return text === "" ? "∅" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");
}
