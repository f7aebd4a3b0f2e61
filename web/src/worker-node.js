/** `worker.js` in Node. */
import "./node.js";
import "./worker.js";
