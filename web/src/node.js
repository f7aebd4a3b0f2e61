/** The package in Node. */
import { usePlatform } from "./platform.js";
import * as node from "./platform-node.js";

export * from "./index.js";
usePlatform(node);
