/** What the server does now: its rows, and where the memory of streams lies. */
import { compact, inBytes } from "./tokens.js";

/**
 * @param {any} figures of one model, by name
 * @param {{rows: HTMLElement, text: HTMLElement, memory: HTMLElement}} parts
 */
export function showServer(figures, { rows, text, memory }) {
  const { rows: count, rows_decoding: decoding, rows_prompt: prompts } = figures;
  const shown = Math.min(count, 256);
  while (rows.children.length > shown) rows.lastElementChild?.remove();
  while (rows.children.length < shown) rows.append(document.createElement("li"));
  [...rows.children].forEach((row, i) => {
    row.className = i < decoding ? "decoding" : i < decoding + prompts ? "prompt" : "";
  });
  const told =
    `${count - decoding - prompts} of ${count} rows are free, ${decoding} draw tokens, ` +
    `${prompts} read prompts. ${figures.num_requests_waiting} requests wait.`;
  rows.setAttribute("aria-label", told);
  text.textContent = told;
  /** @type {[string, string][]} */
  const numbers = [
    ["A stream", inBytes(figures.bytes_per_stream)],
    ["Streams kept", figures.streams.toLocaleString("en")],
    ["of them in memory", `${figures.streams_in_memory} · ${inBytes(figures.streams_memory_bytes)}`],
    ["Prefix cache", inBytes(figures.prefix_cache_bytes ?? 0)],
    ["Tokens fed", compact(figures.engine_tokens_fed_total)],
    ["Tokens drawn", compact(figures.engine_tokens_drawn_total)],
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
