/*
 * Says in one sentence why the page cannot run: it was opened from a file, or the browser is too old. Neither
 * loads modules, so this is a script, and it is written for old browsers.
 */
(function () {
  "use strict";
  var vectors = [
    0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98,
    11,
  ];
  var missing = "";
  if (!("noModule" in document.createElement("script"))) missing = "JavaScript modules";
  else if (typeof WebAssembly !== "object") missing = "WebAssembly";
  else if (!WebAssembly.validate(new Uint8Array(vectors))) missing = "WebAssembly with vectors";
  else if (typeof BigInt64Array !== "function") missing = "64-bit integers";
  else if (!Array.prototype.toSorted || !Object.hasOwn) missing = "the JavaScript of 2023";
  var opened = location.protocol === "file:";
  if (!missing && !opened) return;
  window.tooOld = true;
  var error = document.getElementById("error");
  var loading = document.getElementById("loading");
  if (opened) {
    error.className = "result";
    error.innerHTML =
      "This page was opened as a file, and browsers run the model only from a web server. In the folder of " +
      "this page, run <code>python3 -m http.server</code> (on Windows: <code>py -m http.server</code>). " +
      "Then open http://localhost:8000/";
  } else
    error.textContent =
      "This browser has no " +
      missing +
      ", which the model needs; use a newer one, such as Chrome 110, Firefox 115 or Safari 16.4.";
  error.removeAttribute("hidden");
  if (loading) loading.setAttribute("hidden", "");
})();
