/** The optional signature of an artefact, `spec.json.sig`: Ed25519 over the bytes of `spec.json`. */
import { MissingError, XLExportError, firstLine } from "../errors.js";

const SIGNATURE = "spec.json.sig";
const SIGNATURE_BYTES = 64;
const PEM = /^\s*-----BEGIN PUBLIC KEY-----([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----\s*$/;

/**
 * Throws unless the owner of a key has signed the content of `spec.json`.
 * @param {import("./source.js").Source} source @param {Uint8Array} content
 * @param {unknown} publicKey in PEM @param {AbortSignal} [signal]
 */
export async function verifySignature(source, content, publicKey, signal) {
  const key = await imported(publicKey);
  let signature;
  try {
    signature = await source.read(SIGNATURE, { most: SIGNATURE_BYTES, signal });
  } catch (error) {
    if (!(error instanceof MissingError)) throw error;
    throw new XLExportError(
      `${SIGNATURE} of ${source.name} is missing, and a public key was given; copy the signature with ` +
        "spec.json, or sign that file with `openssl pkeyutl -sign -rawin`.",
    );
  }
  const [signed, bytes] = /** @type {Uint8Array<ArrayBuffer>[]} */ ([signature, content]);
  if (!(await crypto.subtle.verify("Ed25519", key, signed, bytes))) {
    throw new XLExportError(
      `${SIGNATURE} of ${source.name} does not fit spec.json and the public key; copy the whole folder ` +
        "again, or sign it with the private key that belongs to this one.",
    );
  }
}

/** The key in the text of a PEM file. @param {unknown} publicKey */
async function imported(publicKey) {
  if (!globalThis.crypto?.subtle) {
    throw new XLExportError("a page verifies signatures only over HTTPS or from localhost; serve it so.");
  }
  const base64 = typeof publicKey === "string" && PEM.exec(publicKey)?.[1];
  try {
    if (!base64) throw new SyntaxError("it is not the text of such a file");
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    return await crypto.subtle.importKey("spki", bytes, "Ed25519", false, ["verify"]);
  } catch (error) {
    if (/** @type {any} */ (error).name === "NotSupportedError") {
      throw new XLExportError(
        "this browser cannot verify Ed25519; use Chrome 137, Firefox 129, Safari 17 or newer.",
      );
    }
    throw new XLExportError(
      `the public key is no Ed25519 key in PEM (${firstLine(error)}); write one with ` +
        "`openssl pkey -in PRIVATE.pem -pubout`.",
    );
  }
}
