"""An artefact as a web page: a static folder with the page, the module, onnxruntime-web and the models."""
