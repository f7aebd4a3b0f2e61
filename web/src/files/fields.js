/** Reads JSON files whose fields format-tables.js describes. */
import { XLExportError, shown } from "../errors.js";
import { TABLES } from "../format-tables.js";
import { parseJson, withoutNumbers } from "./json.js";

/**
 * The value of a file, with what may be absent filled in, except null.
 * @param {string} kind of file, a name in TABLES @param {Uint8Array} bytes @param {string} where
 * @returns {any}
 */
export function readFields(kind, bytes, where) {
  const value = parseJson(bytes, where);
  const wrong = fault(TABLES[kind], value, withoutNumbers(bytes, where), "it");
  if (wrong) throw new XLExportError(`${where} is damaged or of another version: ${wrong}; export it again.`);
  return value;
}

/** @param {unknown} value */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** The first of some faults; "" if there is none. @param {any[]} items @param {(item: any) => string} of */
function first(items, of) {
  for (const item of items) {
    const found = of(item);
    if (found) return found;
  }
  return "";
}

/**
 * Why a value is not of a type, as a part of a sentence; "" if it is. cpp/tools/format_tables.py describes
 * the types.
 * @param {any} type @param {any} value @param {any} written the value with the texts of its numbers
 * @param {string} name of the value
 * @returns {string}
 */
export function fault(type, value, written, name) {
  const [[kind, limits]] = Object.entries(type);
  const unless = (/** @type {unknown} */ holds, /** @type {string} */ expected) =>
    holds ? "" : `${name} is ${shown(value)}; expected ${expected}`;
  const inside = typeof value === "number" && !(value < limits[0]) && !(value > limits[1]);
  const range = limits.length ? ` from ${limits[0]} to ${limits[1]}` : "";
  switch (kind) {
    case "integer":
      return unless(inside && /^-?\d+$/.test(written), `a whole number${range}`);
    case "number":
      return unless(inside && Number.isFinite(value), `a number${range}`);
    case "boolean":
      return unless(typeof value === "boolean", "true or false");
    case "null":
      return unless(value === null, "null");
    case "choice":
      return unless(limits.includes(value), `one of ${limits.join(", ")}`);
    case "text": {
      const [what = "a text", start, rest, least, most] = limits;
      const sound = (/** @type {string} */ text) =>
        text.length >= least &&
        text.length <= most &&
        start.includes(text[0]) &&
        [...text].every((character) => rest.includes(character));
      return unless(typeof value === "string" && (!limits.length || sound(value)), what);
    }
    case "any": {
      const found = limits.map((/** @type {any} */ each) => fault(each, value, written, name));
      return found.includes("") ? "" : found[0];
    }
    case "list":
      if (!Array.isArray(value)) return unless(false, "a list");
      return first([...value.keys()], (index) =>
        fault(limits, value[index], written[index], `an item of ${name}`),
      );
    case "map":
      if (!isObject(value)) return unless(false, "an object");
      return first(
        Object.keys(value),
        (key) =>
          fault(limits[0], key, key, `a key of ${name}`) ||
          fault(limits[1], value[key], written[key], shown(key)),
      );
    default: {
      if (!isObject(value)) return unless(false, "an object");
      const unknown = Object.keys(value).find((key) => !Object.hasOwn(limits, key));
      if (unknown !== undefined) return `it has the unknown key ${shown(unknown)}`;
      return first(Object.keys(limits), (key) => {
        if (Object.hasOwn(value, key)) return fault(limits[key], value[key], written[key], key);
        if (!Object.hasOwn(type.absent, key)) return `it has no "${key}"`;
        // A copy, because callers may change it.
        if (type.absent[key] !== null) value[key] = JSON.parse(JSON.stringify(type.absent[key]));
        return "";
      });
    }
  }
}
