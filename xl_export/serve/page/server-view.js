/** What the server does now: its rows, and its memory for streams. */
import { compact, inBytes } from "./tokens.js";

/**
 * @param {any} figures of one model, by name
 * @param {{rows: HTMLElement, text: HTMLElement, memory: HTMLElement}} parts
 */
export function showServer(figures, { rows, text, memory }) {
  const { rows: count, rows_decoding: decoding, rows_prompt: prompts } = figures;
  const shown = Math.min(count, 256);
  while (rows.children.length > shown) rows.lastElementChild?.remove();
  while (rows.children.length < shown) rows.append(document.createElement("i"));
  [...rows.children].forEach((row, i) => {
    row.className = i < decoding ? "decoding" : i < decoding + prompts ? "prompt" : "";
  });
  rows.setAttribute("aria-label", `${decoding + prompts} of ${count} rows in use`);
  text.textContent = `${decoding} generating · ${prompts} reading · ${figures.num_requests_waiting} queued`;
  /** @type {[string, string][]} */
  const numbers = [
    ["Streams", figures.streams.toLocaleString("en")],
    ["of them in memory", `${figures.streams_in_memory} · ${inBytes(figures.streams_memory_bytes)}`],
    ["Prefix cache", inBytes(figures.prefix_cache_bytes ?? 0)],
    ["Tokens read", compact(figures.engine_tokens_fed_total)],
    ["Tokens generated", compact(figures.engine_tokens_drawn_total)],
  ];
  memory.replaceChildren(
    ...numbers.flatMap(([name, value]) => {
      const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
      dt.textContent = name;
      dd.textContent = value;
      return [dt, dd];
    }),
  );
}
