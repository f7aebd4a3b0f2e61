/** The text of a generated stream as it grows. It releases what can no longer be part of a stop string. */

export class GrowingText {
  /**
   * @param {import("../../index.js").Decoder} decode @param {string[]} stop
   * @param {string} border surrounds each token, and so a stop string; empty if a stop string may be a part
   * of a token
   * @param {boolean} [goesOn] whether a later text continues this one, so that half a character at its end
   * waits for the other half
   */
  constructor(decode, stop, border, goesOn = false) {
    this.decode = decode;
    this.goesOn = goesOn;
    this.border = border;
    this.stop = stop.map((text) => border + (border ? text.trim() : text) + border);
    this.held = "";
    /** @type {"end" | "stop" | "length" | null} */
    this.ended = null;
  }

  /** The text that was held back, released by the end of the document. */
  finish() {
    this.ended = "end";
    return this.held + this.decode.rest();
  }

  /**
   * The text that is released by one more token; all of it with the last one.
   * @param {number} token @param {boolean} last
   */
  add(token, last) {
    if (last) this.ended = "length";
    this.held += this.decode(token);
    if (last || this.stop.length) {
      // A stop string ends the text as soon as it is there, even if a later token could change it.
      const text = this.held + this.decode.rest();
      const whole = text + this.border;
      const found = this.stop.map((stop) => whole.indexOf(stop)).filter((at) => at >= 0);
      if (found.length) {
        this.ended = "stop";
        return text.slice(0, Math.min(...found));
      }
      if (last) return this.held + this.decode.rest(!this.goesOn);
    }
    const keep = this.#overlap();
    const released = this.held.slice(0, this.held.length - keep);
    this.held = this.held.slice(this.held.length - keep);
    return released;
  }

  /** The length of the longest end of the held text with which a stop string begins. */
  #overlap() {
    const whole = this.held + this.border;
    const longest = Math.max(1, ...this.stop.map((text) => text.length)) - 1;
    for (let length = Math.min(longest, whole.length); length > this.border.length; length--) {
      if (this.stop.some((text) => text.startsWith(whole.slice(-length)))) return length - this.border.length;
    }
    return 0;
  }
}
