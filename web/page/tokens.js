/**
 * The tokens of the text on the page: which part of the text each of them covers, and how surprising it was.
 * Nothing here knows the page or the model.
 */

/** What the tokens are, by the kind of the vocabulary. @type {Record<string, string>} */
export const NAMES_OF_TOKENS = {
  byte: "bytes",
  char: "characters",
  word: "words",
  subword: "words and parts of words",
  ids: "symbols",
};

/**
 * Where each token of a text ends in it, as an offset.
 *
 * The text is what somebody typed, and the pieces are what the vocabulary makes of its tokens. They differ
 * where it lowers case, joins blanks or does not know a word. A piece that is not found takes what lies
 * before the next one that is.
 * @param {string} text @param {string[]} pieces @returns {number[]}
 */
export function endsOf(text, pieces) {
  if (pieces.join("") === text) return runningEnds(pieces);
  const lower = text.toLowerCase();
  const same = lower.length === text.length; // a few capitals are longer in small letters
  /** @type {number[]} */
  const ends = [];
  let at = 0;
  let unknown = 0; // pieces since the last one that was found
  for (const piece of pieces) {
    const word = piece.trim();
    const found = word === "" ? -1 : find(text, same ? lower : text, word, at, unknown > 0);
    if (found < 0) {
      unknown += 1;
      ends.push(at);
      continue;
    }
    spread(ends, unknown, at, found);
    unknown = 0;
    at = found + word.length;
    ends.push(at);
  }
  if (unknown) spread(ends, unknown, at, text.length);
  else if (ends.length) ends[ends.length - 1] = text.length;
  return ends;
}

/** @param {string[]} pieces */
function runningEnds(pieces) {
  let at = 0;
  return pieces.map((piece) => (at += piece.length));
}

/**
 * The offset of a word behind `from`; -1 where other text lies before it, unless `anywhere`.
 * @param {string} text @param {string} lower @param {string} word @param {number} from @param {boolean}
 *   anywhere
 */
function find(text, lower, word, from, anywhere) {
  for (const [hay, needle] of [
    [text, word],
    [lower, word.toLowerCase()],
  ]) {
    const found = hay.indexOf(needle, from);
    if (found >= 0 && (anywhere || text.slice(from, found).trim() === "")) return found;
  }
  return -1;
}

/**
 * Shares the text from `from` to `to` among the last `count` tokens.
 * @param {number[]} ends @param {number} count @param {number} from @param {number} to
 */
function spread(ends, count, from, to) {
  for (let i = 1; i <= count; i++) {
    ends[ends.length - count + i - 1] = from + Math.round(((to - from) * i) / count);
  }
}

/**
 * How many characters two texts have in common at their beginning; never half of a character.
 * @param {string} a @param {string} b
 */
export function commonLength(a, b) {
  const most = Math.min(a.length, b.length);
  let length = 0;
  while (length < most && a.charCodeAt(length) === b.charCodeAt(length)) length++;
  const half = length > 0 && /[\ud800-\udbff]/.test(a[length - 1]);
  return half ? length - 1 : length;
}

const STEPS = [0.5, 1, 2, 3.5, 5, 7, 9.5, 12]; // bits; where one colour of a token ends

/**
 * The number of the colour of a surprisal, 0 (expected) to 8; -1 where there is none.
 * @param {number} bits
 */
export function colourOf(bits) {
  if (!Number.isFinite(bits)) return -1;
  const step = STEPS.findIndex((limit) => bits < limit);
  return step < 0 ? STEPS.length : step;
}

/** A surprisal in words. @param {number} bits */
export function inBits(bits) {
  if (!Number.isFinite(bits)) return "not predicted: nothing comes before it";
  const odds = 2 ** bits;
  const digits = { maximumSignificantDigits: odds < 10 ? 2 : 3 };
  const chance = `chance 1 in ${odds.toLocaleString("en", digits)}`;
  return `${odds < 1.05 ? "expected" : chance} (${bits.toFixed(2)} bits)`;
}

/** A number of bytes in words. @param {number} count */
export function inBytes(count) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let value = count;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${unit === 0 ? value : value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${units[unit]}`;
}
