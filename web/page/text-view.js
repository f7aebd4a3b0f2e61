/** The text on the page: a text area, and behind it the same text with a colour for each token. */
import { part } from "./side.js";
import { colourOf, inBits } from "./tokens.js";

/** @typedef {import("./stream.js").Stream} Stream */

export class TextView {
  constructor() {
    this.area = /** @type {HTMLTextAreaElement} */ (part("text"));
    this.colours = part("colours");
    this.scroll = part("scroll");
    this.token = part("token");
    this.earlier = part("earlier");
    this.why = part("why");
    /** @type {HTMLSpanElement[]} One for each token of the stream; those without text are not in the page. */
    this.spans = [];
    this.length = 0; // characters of the stream's text in the text area
    /** @type {HTMLSpanElement | null} */
    this.marked = null;
    this.end = document.createTextNode("\u200b"); // so that a new line at the end has its height
    this.colours.append(this.end);
  }

  /**
   * Shows the tokens of a stream from one on; the text area has its text already, unless `write`.
   * @param {Stream} stream @param {number} from @param {boolean} [write]
   */
  show(stream, from, write = false) {
    from = Math.min(from, this.spans.length);
    for (const span of this.spans.splice(from)) span.remove();
    this.#add(stream, from);
    if (write) this.area.value = stream.text;
    this.length = stream.text.length;
    this.#rest();
  }

  /** Adds what a stream has got since. @param {Stream} stream */
  grow(stream) {
    const { area } = this;
    const follows = this.#follows;
    this.#add(stream, this.spans.length);
    const added = stream.text.slice(this.length);
    const end = area.value.length;
    const atEnd = area.selectionStart === end; // a caret at the end stays there for further typing
    if (added) area.setRangeText(added, end, end, "preserve");
    if (atEnd) area.setSelectionRange(area.value.length, area.value.length);
    this.length = stream.text.length;
    if (follows) this.toEnd();
  }

  /**
   * Takes the first tokens away.
   * @param {number} count @param {number} cut characters @param {number} earlier tokens that are gone
   */
  shorten(count, cut, earlier) {
    for (const span of this.spans.splice(0, count)) span.remove();
    const { selectionStart, selectionEnd } = this.area;
    this.area.setRangeText("", 0, cut, "preserve");
    this.area.setSelectionRange(Math.max(0, selectionStart - cut), Math.max(0, selectionEnd - cut));
    this.length -= cut;
    this.before(earlier);
  }

  /** Says how many tokens came before the text that is shown. @param {number} count */
  before(count) {
    this.earlier.hidden = count === 0;
    const number = count.toLocaleString("en");
    const left = `… ${number} earlier tokens are no longer shown.`;
    this.earlier.textContent = `${left} The stream continues from them.`;
  }

  /** Says below the text why it ends there; nothing for an empty reason. @param {string} reason */
  finish(reason) {
    const follows = this.#follows;
    this.why.textContent = reason;
    this.why.hidden = !reason;
    if (follows) this.toEnd();
  }

  /** Shows the end of the text, which then stays in view. */
  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** Whether the end of the text is in view, and shall stay there. */
  get #follows() {
    return this.scroll.scrollTop + this.scroll.clientHeight > this.scroll.scrollHeight - 48;
  }

  /** Leaves the colours of what was typed and not computed yet off. */
  #rest() {
    this.end.data = `${plain(this.area.value.slice(this.length))}\u200b`;
  }

  /**
   * The text area was changed by somebody, and nothing is computed yet.
   * @param {number} common characters that are as they were @param {Stream} stream
   */
  typed(common, stream) {
    let count = Math.min(this.spans.length, stream.ids.length);
    while (count > 0 && stream.ends[count - 1] > common) count--;
    for (const span of this.spans.splice(count)) span.remove();
    this.length = stream.ends[count - 1] ?? 0;
    this.#rest();
  }

  /** @param {Stream} stream @param {number} from */
  #add(stream, from) {
    const added = document.createDocumentFragment();
    for (let i = from; i < stream.ids.length; i++) {
      const span = document.createElement("span");
      const text = plain(stream.text.slice(stream.ends[i - 1] ?? 0, stream.ends[i]));
      // blanks have no colour: it would hang over the end of a line
      const [, before, word, after] = /** @type {RegExpExecArray} */ (/^(\s*)(.*?)(\s*)$/s.exec(text));
      const mark = document.createElement("mark");
      mark.className = `s${Math.max(0, colourOf(stream.bits[i]))}`;
      mark.textContent = word;
      span.append(before, ...(word ? [mark] : []), after);
      this.spans.push(span);
      if (span.textContent) added.append(span);
    }
    this.colours.insertBefore(added, this.end);
  }

  /**
   * Says how surprising the token at the caret, or under the pointer, was.
   * @param {Stream} stream @param {{x: number, y: number} | null} point
   */
  describe(stream, point) {
    const index = point ? this.#under(point) : this.#atCaret(stream);
    this.silent();
    if (!this.spans[index] || index >= stream.ids.length) return;
    this.marked = this.spans[index];
    this.marked.classList.add("at");
    const text = document.createElement("b");
    text.textContent = visible(stream.text.slice(stream.ends[index - 1] ?? 0, stream.ends[index]));
    const at = stream.position - stream.ids.length + index;
    const expected = (stream.handle.likeliest?.(at) ?? [])
      .map((each) => `${visible(each.text)} ${Math.round(100 * 2 ** -each.bits)} %`)
      .join(", ");
    this.token.replaceChildren(
      text,
      ` ${inBits(stream.bits[index])} · token ${at.toLocaleString("en")}`,
      expected && ` · likeliest: ${expected}`,
    );
  }

  /** Says nothing about any token. */
  silent() {
    this.marked?.classList.remove("at");
    this.marked = null;
    this.token.textContent = "\u00a0";
  }

  /** @param {{x: number, y: number}} point */
  #under({ x, y }) {
    // The text area lies over the tokens, and the layer of tokens lets the pointer through: not for this
    // question.
    this.colours.classList.add("asked");
    const found = document.elementsFromPoint(x, y).find((element) => element.parentNode === this.colours);
    this.colours.classList.remove("asked");
    return found ? this.spans.indexOf(/** @type {HTMLSpanElement} */ (found)) : -1;
  }

  /** The token that ends at or behind the caret. @param {Stream} stream */
  #atCaret(stream) {
    const caret = this.area.selectionStart;
    let [low, high] = [0, stream.ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (stream.ends[middle] < caret) low = middle + 1;
      else high = middle;
    }
    return caret > 0 ? low : -1;
  }
}

/** A text as a text area shows it. @param {string} text */
function plain(text) {
  return text.replace(/\r\n?/g, "\n");
}

/** A token with signs for what one does not see. @param {string} text */
function visible(text) {
  return text === "" ? "∅" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");
}
