/** Runs the test files that are named, or all but the slow ones, in one process: WebAssembly is compiled once. */
const chosen = process.argv.slice(2);
for (const name of chosen.length ? chosen : ["parity", "vocabulary", "files", "streams", "self-check", "page"])
  await import(`./${name}.test.js`);
