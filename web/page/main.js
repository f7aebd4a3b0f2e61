/** The page of a site that `xl-export web` has written: it opens a model and gives it to text or to music. */
import { XLExportError, open } from "../src/index.js";
import { MusicWork } from "./music-work.js";
import { noteOf, withNote } from "./saved.js";
import { isMusic } from "./scheme.js";
import { Side, part } from "./side.js";
import { Refusal } from "./stream.js";
import { TextWork } from "./text-work.js";
import { inBytes } from "./tokens.js";

const MOST_THREADS = 4; // more only wait for each other in models that a page can hold
const LARGE = 32e6; // bytes; in smaller models a second thread waits longer than it computes
const MOST_FILE = 2 ** 31; // bytes of a saved stream

/** Shows an error in one sentence. @param {unknown} error */
function fail(error) {
  const known = error instanceof XLExportError || error instanceof Refusal;
  const text = error instanceof Error ? error.message : String(error);
  const sentence = known ? text : `something failed that should not (${text}); reload the page.`;
  // a sentence begins with a capital letter, but the name of a file stays as it is
  part("error").textContent = /^[a-z]+ /.test(sentence)
    ? sentence[0].toUpperCase() + sentence.slice(1)
    : sentence;
  part("error").hidden = false;
  part("loading").hidden = true;
  if (!known) console.error(error);
}

/** Takes the shown error away. */
function hideError() {
  part("error").hidden = true;
}

/** Says something to those who do not see the page. @param {string} text */
function say(text) {
  part("said").textContent = text;
}

/**
 * Does work that a button asks for, and shows how it failed.
 * @param {string} id @param {() => Promise<void>} work
 */
function button(id, work) {
  const element = /** @type {HTMLButtonElement} */ (part(id));
  element.addEventListener("click", async () => {
    element.disabled = true;
    try {
      await work();
    } catch (error) {
      fail(error);
    } finally {
      element.disabled = false;
    }
  });
}

/** The models of the site. @returns {Promise<{name: string, path: string, num_bytes: number}[]>} */
async function models() {
  const response = await fetch("site.json").catch(() => null);
  const site = response?.ok ? await response.json().catch(() => null) : null;
  if (!Array.isArray(site?.models) || !site.models.length) {
    throw new Refusal(
      "site.json, which lists the models of this page, could not be read; copy the whole folder again.",
    );
  }
  return site.models;
}

/** Lets one choose among several models. @param {{name: string}[]} listed @param {string} name */
function chooser(listed, name) {
  const select = /** @type {HTMLSelectElement} */ (part("model"));
  for (const model of listed) select.append(new Option(model.name, model.name, false, model.name === name));
  part("chooser").hidden = listed.length < 2;
  select.addEventListener("change", () => {
    const address = new URL(location.href);
    address.searchParams.set("model", select.value);
    location.assign(address);
  });
}

/** @param {{name: string, path: string, num_bytes: number}} model */
async function load({ name, path, num_bytes: size }) {
  const wanted = new URL(location.href).searchParams;
  const useful = size < LARGE ? 1 : Math.min(MOST_THREADS, navigator.hardwareConcurrency || 1);
  const threads = Number(wanted.get("threads")) || useful;
  const bar = /** @type {HTMLProgressElement} */ (part("loading-bar"));
  part("loading-text").textContent = `Loading ${name}…`;
  return open(new URL(path, location.href), {
    worker: wanted.get("worker") !== "no",
    device: /** @type {any} */ (wanted.get("device") ?? "auto"),
    threads: globalThis.crossOriginIsolated ? threads : 1,
    onProgress: ({ loaded, total }) => {
      bar.value = total ? loaded / total : 0;
      part("loading-text").textContent = `Loading ${name}: ${inBytes(loaded)} of ${inBytes(total)}`;
    },
  });
}

/** @param {import("../index.js").Model} model @param {string} name */
function facts({ facts: known, spec }, name) {
  const threads = known.threads > 1 ? `, ${known.threads} threads` : "";
  const element = part("facts");
  const millions = (spec.model.parameters / 1e6).toFixed(1);
  const computed = `${known.computedBy}${threads} · memory ${known.memory}`;
  element.textContent = `${name}: ${millions} M parameters · ${computed}`;
  const reasons = [known.deviceReason, known.memoryReason, known.threadsReason].filter(Boolean);
  element.title = reasons.join("; ");
  part("concern").textContent = spec.concern ? `Warning: ${spec.concern}` : "";
  part("concern").hidden = !spec.concern;
}

/** The names of the tokens where they are those of music. @param {import("../index.js").Model} model */
function musicNames({ vocabulary }) {
  if (vocabulary.kind !== "ids") return null;
  const names = Array.from({ length: vocabulary.size }, (_, id) => vocabulary.decoder()(id));
  return isMusic(names) ? names : null;
}

async function main() {
  const listed = await models();
  const wanted = new URL(location.href).searchParams.get("model");
  const chosen = listed.find((each) => each.name === wanted) ?? listed[0];
  chooser(listed, chosen.name);
  document.title = `${chosen.name} · xl-export`;
  const model = await load(chosen);
  const memory = await model.start();
  facts(model, chosen.name);
  const names = musicNames(model);
  part("loading").hidden = true;
  part("work").hidden = false;
  part(names ? "music-work" : "text-work").hidden = false;
  const page = { side: new Side(model), fail, hideError, say };
  const work = names ? new MusicWork(model, memory, names, page) : new TextWork(model, memory, page);
  checking(model, work);
  files(work, chosen.name);
  keys(work);
  /** @type {any} */ (globalThis).page = { model, work }; // for whoever looks at the page's console
  say(`${chosen.name} is ready.`);
  if (!names) part("text").focus();
}

/** @param {import("../index.js").Model} model @param {TextWork | MusicWork} work */
function checking(model, work) {
  const result = part("check-result");
  /** @type {HTMLButtonElement} */ (part("check")).disabled = false;
  button("check", async () => {
    await work.pause();
    result.hidden = false;
    result.className = "result";
    result.textContent = "Checking…";
    const { passed, sentence, seconds } = await model.check();
    result.classList.toggle("failed", !passed);
    result.textContent = `${passed ? "Passed" : "FAILED"}: ${sentence}; ${seconds.toFixed(1)} s.`;
  });
}

/** @param {TextWork | MusicWork} work @param {string} name */
function files(work, name) {
  const file = /** @type {HTMLInputElement} */ (part("file"));
  button("save", async () => {
    const { file: stream, note } = await work.save();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([/** @type {any} */ (withNote(stream, note))]));
    link.download = `${name}.stream`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    say("The stream was saved.");
  });
  part("load").addEventListener("click", () => file.click());
  file.addEventListener("change", async () => {
    const given = file.files?.[0];
    file.value = "";
    if (!given) return;
    try {
      if (given.size > MOST_FILE)
        throw new Refusal(
          `${given.name} is larger than any saved stream; choose a file that Save has written.`,
        );
      const stream = new Uint8Array(await given.arrayBuffer());
      await work.load(stream, noteOf(stream));
    } catch (error) {
      fail(error);
    }
  });
}

/** @param {TextWork | MusicWork} work */
function keys(work) {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!event.repeat) work.toggle().catch(fail);
    } else if (event.key === "Escape") work.stop().catch(fail);
  });
}

if (!(/** @type {any} */ (globalThis).tooOld)) main().catch(fail);
