/** The page: connects to a back end, in the browser or on a server, and shows text or music of its model. */
import { MusicWork } from "./music-work.js";
import { isMusic } from "./scheme.js";
import { Side, button, download, fail, hideError, part, say, useDefaults, useSettings } from "./side.js";
import { Refusal } from "./stream.js";
import { TextWork } from "./text-work.js";
import { inBytes } from "./tokens.js";

const MOST_FILE = 2 ** 31; // bytes of a saved stream
const POLL_MS = 1000; // milliseconds between two looks at the server
const PASSED_MS = 20_000; // milliseconds for which the result of a check that passed is shown
/** The page's own title and description, and what they are for music. */
const OF_MUSIC = {
  "A small language model": "A small music model",
  "Watch it write, see how surprising it found each word, and write along.":
    "Watch it write, see how surprising it found each note, and listen.",
};

/** What the model is, and where it computes. @param {import("./back-end.d.ts").Description} known */
function describe(known) {
  part("facts").textContent = known.facts;
  const manual = known.manual
    ? Object.assign(document.createElement("a"), { href: known.manual, textContent: "What is this?" })
    : "";
  const read = known.trainedTokens
    ? `Training showed it ${inWords(known.trainedTokens)} ${known.tokens} (tokens), repeats included`
    : `It reads and writes ${known.tokens} (tokens)`;
  part("intro").replaceChildren(`${read}. It runs ${known.where}. `, manual);
  part("intro").hidden = false;
  part("concern").textContent = known.concern ? `Warning: ${known.concern}` : "";
  part("concern").hidden = !known.concern;
  const select = /** @type {HTMLSelectElement} */ (part("model"));
  for (const name of known.models) select.append(new Option(name, name, false, name === known.name));
  part("chooser").hidden = known.models.length < 2;
  select.addEventListener("change", () => {
    const address = new URL(location.href);
    address.searchParams.set("model", select.value);
    address.hash = "";
    location.assign(address);
  });
}

async function main() {
  part("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(/** @type {HTMLInputElement} */ (part("api-key")).value);
    location.reload();
  });
  const { connect, setKey } = await import(`./backend-${document.documentElement.dataset.backEnd}.js`);
  const wanted = new URL(location.href).searchParams;
  const bar = /** @type {HTMLProgressElement} */ (part("loading-bar"));
  const progress = (/** @type {number} */ loaded, /** @type {number} */ total) => {
    bar.value = total ? loaded / total : 0;
    const there = total > 0 && loaded >= total;
    part("loading-text").textContent = there
      ? "Starting the engine…"
      : `Loading ${inBytes(loaded)} of ${inBytes(total)}`;
  };
  const backEnd = await connect({ model: wanted.get("model"), wanted, progress });
  const known = backEnd.describe();
  describe(known);
  part("loading").hidden = true;
  part("work").hidden = false;
  const music = isMusic(known.names);
  part(music ? "music-work" : "text-work").hidden = false;
  if (music) useWordsOfMusic();
  const link = location.hash.length > 1 ? linked(location.hash.slice(1)) : null;
  useDefaults(known.sampling);
  if (link) useSettings(link);
  const side = new Side(backEnd);
  const work = music ? new MusicWork(backEnd, side) : new TextWork(backEnd, side);
  /** @type {any} */ (globalThis).page = { backEnd, work, model: backEnd.model }; // for the page's console
  keys(work);
  files(work, known.name);
  checking(backEnd, work);
  part("far").addEventListener("click", async () => {
    if (side.reading) side.reading.abort();
    else await side.readFar(work.pause()).catch(fail);
  });
  if (backEnd.status) look(backEnd);
  addEventListener("hashchange", () => location.reload());
  addEventListener("pagehide", (event) => event.persisted || work.leave());
  await work.begin(link);
  say(`${known.models.length > 1 ? known.name : document.title} is ready.`);
  /** @type {any} */ (globalThis).page.ready = true;
}

/** Replaces the page's own words of text. */
function useWordsOfMusic() {
  const heading = document.querySelector("h1")?.lastChild;
  const about = document.querySelector(".about");
  for (const [text, music] of Object.entries(OF_MUSIC)) {
    if (document.title === text) document.title = music;
    for (const each of [heading, about]) if (each?.textContent?.trim() === text) each.textContent = music;
  }
}

/** A large number, such as 41 million. @param {number} count */
function inWords(count) {
  const style = { notation: "compact", compactDisplay: "long", maximumSignificantDigits: 2 };
  return count.toLocaleString("en", /** @type {any} */ (style));
}

/** @param {any} backEnd @param {TextWork | MusicWork} work */
function checking(backEnd, work) {
  const result = part("check-result");
  part("check").hidden = !backEnd.check;
  button("check", async () => {
    await work.pause();
    result.hidden = false;
    result.className = "result";
    result.textContent = "Checking…";
    result.scrollIntoView({ block: "nearest" }); // on a phone the button is far below it
    const { passed, sentence, seconds } = await backEnd.check();
    result.classList.toggle("failed", !passed);
    const verdict = `This device computes ${passed ? "correctly" : "WRONG answers"}`;
    result.textContent = `${verdict}: ${sentence}; ${seconds.toFixed(1)} s.`;
    if (passed) setTimeout(() => (result.hidden = true), PASSED_MS);
  });
}

/** @param {TextWork | MusicWork} work @param {string} name */
function files(work, name) {
  const file = /** @type {HTMLInputElement} */ (part("file"));
  button("save", async () => download(`${name}.stream`, await work.save()));
  button("link", async () => {
    const address = new URL(work.link(), location.href).href;
    let done = "Copied";
    try {
      await navigator.clipboard.writeText(address);
    } catch {
      history.replaceState(null, "", address); // without HTTPS a page has no clipboard
      done = "See address";
    }
    part("link").textContent = done;
    setTimeout(() => (part("link").textContent = "Copy link"), 1500);
    say("The link was copied.");
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
      await work.load(new Uint8Array(await given.arrayBuffer()));
    } catch (error) {
      fail(error);
    }
  });
}

/** @param {TextWork | MusicWork} work */
function keys(work) {
  document.addEventListener("keydown", (event) => {
    if (event.isComposing) return; // Enter ends what an input method composes
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!event.repeat) work.toggle().catch(fail);
    } else if (event.key === "Escape") work.stop().catch(fail);
  });
}

/** The text and the settings in a link. @param {string} hash */
function linked(hash) {
  const given = [...new URLSearchParams(hash)];
  return Object.fromEntries(
    given.map(([name, text]) => [name, isNaN(Number(text)) || name === "text" ? text : Number(text)]),
  );
}

/** Shows what the server does, again and again. @param {any} backEnd */
async function look(backEnd) {
  part("server").hidden = false;
  let away = false; // whether the error that is shown came from here
  for (; ; await new Promise((resolve) => setTimeout(resolve, POLL_MS))) {
    if (document.hidden) continue;
    try {
      const { lines, note } = await backEnd.status();
      part("status").textContent = lines.join("\n");
      part("streams-note").textContent = note;
      if (away) hideError();
      away = false;
    } catch (error) {
      if (!away) fail(error);
      away = true;
    }
  }
}

if (!(/** @type {any} */ (globalThis).tooOld)) main().catch(fail);
