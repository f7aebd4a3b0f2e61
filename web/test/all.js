/**
 * Runs the test files that are named, or all but the slow ones, in one process: WebAssembly is compiled once.
 */
import { after } from "node:test";

// What a failed test left open would keep Node running, and hide the failure.
after(() =>
  setTimeout(() => {
    console.error("a test left something open: see its failure, or what it does not close");
    process.exit(1);
  }, 3000).unref(),
);

const chosen = process.argv.slice(2);
const usual = ["vocabulary", "files", "feed", "streams", "self-check", "runtime", "page", "server", "gpu"];
for (const name of chosen.length ? chosen : usual) await import(`./${name}.test.js`);
