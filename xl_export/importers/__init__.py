"""Reads checkpoints of other projects without running anything that they contain."""

#: The files of each format, for help and messages. `formats.py` has the modules that read them.
FILES = {
    "kimiyoung": "model.pt of kimiyoung/transformer-xl, with its cache.pt",
    "nvidia": "checkpoint_*.pt of NVIDIA DeepLearningExamples",
    "fairseq": "checkpoint_*.pt of fairseq's examples/truncated_bptt, with its dict.txt",
    "huggingface": "the folder of a TransfoXL model, whose weights may be shards",
    "adaptive-span": "checkpoint.pt of facebookresearch/adaptive-span, with its corpus.pt",
    "tensorflow": "a checkpoint of the original TensorFlow release, or an .npz file of its variables",
    "xl-export": "a run of this project",
}
