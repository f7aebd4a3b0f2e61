/**
 * Which tokens a changed text has, and how many of the tokens it had before stay.
 *
 * The text is encoded as a whole, because a part of it may have other tokens than it has inside the whole.
 * Tokens that the model generated stay as they are, even where the vocabulary would cut their text in another
 * way. Nothing here knows the page or the model.
 */
import { commonLength, endsOf } from "./tokens.js";

/**
 * @typedef {(text: string) => Promise<{ids: number[], texts: string[]}>} Tokenize
 * @typedef {{
 *   text: string, context: string, ids: number[], ends: number[], lead: number, given: number,
 * }} Shown the text that is shown and its tokens. `context`: characters before it that are no longer shown.
 *   `lead`: how many tokens stand before the text. `given`: how many were not made by encoding, but
 *   generated or loaded
 * @typedef {{
 *   keep: number, ids: number[], from: number, ends: number[],
 * }} Change `keep`: the number of tokens that stay. `ids`: the tokens after those. `from`, `ends`: the first
 *   token whose place in the text is another one, and where the tokens from there on end
 */

/**
 * The change of the tokens that a new text makes. Raises an error for a text that cannot be encoded.
 * @param {Tokenize} tokenize @param {Shown} shown @param {string} text @returns {Promise<Change>}
 */
export async function changeTo(tokenize, shown, text) {
  const common = commonLength(shown.text, text);
  if (text === "" && !shown.context) return { keep: 0, ids: [], from: 0, ends: [] };
  const make = shown.given || shown.context ? aligned : encoded;
  return withBlanks(await make(tokenize, shown, text, common), shown.lead, text);
}

/**
 * Everything was typed: the whole text is tokenized.
 * @param {Tokenize} tokenize @param {Shown} shown @param {string} text @param {number} common
 */
async function encoded(tokenize, { ids, ends }, text, common) {
  const whole = await tokenize(text);
  const keep = commonIds(ids, whole.ids);
  const from = Math.min(keep, within(ends, common));
  const places = placed(whole.texts.slice(from), text, ends[from - 1] ?? 0);
  return { keep, ids: whole.ids.slice(keep), from, ends: places };
}

/**
 * Some tokens were generated or loaded: they stay up to the last place before the change where a token ends
 * both among them and in the encoded text.
 * @param {Tokenize} tokenize @param {Shown} shown @param {string} text @param {number} common
 */
async function aligned(tokenize, { context, ids, ends, lead, given }, text, common) {
  const { ids: whole, texts } = await tokenize(context + text);
  const places = placed(texts, context + text, 0).map((end) => end - context.length);
  /**
   * @type {Map<number, number[]>} for each place: the numbers of tokens after which the encoded text is there
   */
  const counts = new Map(context ? [] : [[0, [0]]]);
  for (const [at, end] of places.entries()) counts.set(end, [...(counts.get(end) ?? []), at + 1]);
  for (let count = Math.min(given, within(ends, common)); count >= 0; count--) {
    const candidates = counts.get(ends[count - 1] ?? 0);
    if (!candidates) continue;
    const same = count > 0 ? candidates.findLast((each) => whole[each - 1] === ids[count - 1]) : undefined;
    const addsNone = count > lead && ends[count - 1] === (ends[count - 2] ?? 0);
    // a part of a character, or a mark that belongs to what follows
    if (same === undefined && addsNone) continue;
    const at = same ?? candidates[0];
    const keep = count + commonIds(ids.slice(count), whole.slice(at));
    return { keep, ids: whole.slice(at + keep - count), from: count, ends: places.slice(at) };
  }
  const alone = await tokenize(text);
  return { keep: 0, ids: alone.ids, from: 0, ends: placed(alone.texts, text, 0) };
}

/**
 * Blanks at the end that are no token belong to the last token.
 * @param {Change} change @param {number} lead @param {string} text @returns {Change}
 */
function withBlanks(change, lead, text) {
  if (change.ends.length || change.keep <= lead) return change;
  return { ...change, from: change.keep - 1, ends: [text.length] };
}

/**
 * Where tokens of these texts end, the first of which begins at `from`.
 * @param {string[]} pieces @param {string} text @param {number} from
 */
function placed(pieces, text, from) {
  return endsOf(text.slice(from), pieces).map((end) => from + end);
}

/** How many tokens end within the first characters. @param {number[]} ends @param {number} length */
function within(ends, length) {
  let count = ends.length;
  while (count > 0 && ends[count - 1] > length) count--;
  return count;
}

/** How many tokens two lists have in common at their beginning. @param {number[]} a @param {number[]} b */
function commonIds(a, b) {
  const most = Math.min(a.length, b.length);
  let count = 0;
  while (count < most && a[count] === b[count]) count++;
  return count;
}
