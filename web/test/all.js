/**
 * Runs the test files that are named, or all but the slow ones, in one process: WebAssembly is compiled once.
 */
const chosen = process.argv.slice(2);
const usual = ["vocabulary", "files", "streams", "self-check", "runtime", "page", "server", "gpu"];
for (const name of chosen.length ? chosen : usual)
  await import(`./${name}.test.js`);
