/** Lets other work of the page or process run, so that a signal can be heard while tokens are computed. */

const LONGEST = 12; // milliseconds of work between two pauses

/** A function to call between steps: it waits one turn of the event loop where enough time has passed. */
export function pauses() {
  let last = performance.now();
  return async () => {
    if (performance.now() - last < LONGEST) return;
    await turn();
    last = performance.now();
  };
}

/** Waits one turn of the event loop. Timers of a page wait 4 ms or more, and messages do not. */
export function turn() {
  return new Promise((/** @type {(value?: unknown) => void} */ resolve) => {
    if (typeof setImmediate === "function") return void setImmediate(resolve);
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}
