// Written by cpp/tools/format_tables.py, which describes it: what may be in spec.json and reference.json, and
// what follows from a model.
#ifndef XL_EXPORT_FORMAT_TABLES_HPP
#define XL_EXPORT_FORMAT_TABLES_HPP

namespace xl_export::detail {

inline constexpr char format_tables[] = R"json({
  "spec": {
    "object": {
      "schema": {"integer": [1, 1]},
      "model": {
        "object": {
          "positions": {"text": []},
          "sublayers": {
            "choice": [
              "feed-forward",
              "all-attention",
              "attn-split",
              "head-split",
              "single-head",
              "ff-attn",
              "own"
            ]
          },
          "layers": {"integer": [0, 4096]},
          "heads": {"integer": [0, 16777216]},
          "head_dim": {"integer": [0, 16777216]},
          "d_model": {"integer": [0, 16777216]},
          "d_ff": {"integer": [0, 16777216]},
          "persistent": {"integer": [0, 16777216]},
          "vocab_size": {"integer": [0, 16777216]},
          "cutoffs": {"list": {"integer": [1, 16777216]}},
          "reaches": {"list": {"list": {"integer": [1, 16777216]}}},
          "pre_norm": {"boolean": []},
          "parameters": {"integer": [0, 9007199254740991]}
        },
        "absent": {}
      },
      "rule": {
        "object": {
          "mem_len": {"integer": [0, 16777216]},
          "segment": {"integer": [1, 16777216]},
          "mask": {"choice": ["same-length", "full"]},
          "clamp_len": {"any": [{"integer": [1, 16777216]}, {"null": []}]},
          "initial_memory": {"choice": ["masked", "zeros"]},
          "include_self": {"boolean": []}
        },
        "absent": {
          "mask": "same-length",
          "clamp_len": null,
          "initial_memory": "masked",
          "include_self": true
        }
      },
      "form": {"choice": ["ring", "shift", "hidden", "own"]},
      "target": {"choice": ["onnxruntime", "tensorrt", "web"]},
      "exporter": {"choice": ["graph", "trace"]},
      "precision": {"choice": ["fp32", "fp16", "int8-stored", "int8", "int4"]},
      "memory_precision": {"choice": ["fp32", "fp16", "int8"]},
      "answers": {"choice": ["exported", "stored-weights", "memory-in-bytes"]},
      "tolerance": {"number": []},
      "mean_tolerance": {"number": []},
      "measured": {
        "any": [
          {
            "object": {
              "tokens": {"integer": [1, 9007199254740991]},
              "bits_per_token": {"number": [-1, 1000000000000000.0]},
              "fp32_bits_per_token": {"number": [-1, 1000000000000000.0]},
              "kl_nats": {"number": [-1, 1000000000000000.0]},
              "agreement": {"number": [0, 1]},
              "num_bytes": {"integer": [0, 9007199254740991]},
              "fp32_num_bytes": {"integer": [0, 9007199254740991]},
              "seconds_per_token": {"number": [-1, 1000000000000000.0]},
              "fp32_seconds_per_token": {"number": [-1, 1000000000000000.0]},
              "drawn": {"boolean": []}
            },
            "absent": {"drawn": false}
          },
          {
            "object": {
              "tokens": {"integer": [1, 9007199254740991]},
              "outputs": {
                "map": [
                  {"text": []},
                  {
                    "object": {
                      "largest": {"number": []},
                      "rms": {"number": []},
                      "changed": {"any": [{"number": []}, {"null": []}]}
                    },
                    "absent": {"largest": 0.0, "rms": 0.0, "changed": null}
                  }
                ]
              },
              "num_bytes": {"integer": [0, 9007199254740991]},
              "fp32_num_bytes": {"integer": [0, 9007199254740991]},
              "seconds_per_step": {"number": [-1, 1000000000000000.0]},
              "fp32_seconds_per_step": {"number": [-1, 1000000000000000.0]}
            },
            "absent": {}
          },
          {"null": []}
        ]
      },
      "concern": {"any": [{"text": []}, {"null": []}]},
      "trained_tokens": {"any": [{"integer": [0, 9007199254740991]}, {"null": []}]},
      "opset": {"integer": [1, 1000]},
      "storage": {"choice": ["external", "single-file", "ort", "fused-ort"]},
      "without": {"list": {"choice": ["padding", "unequal", "cuts", "rows"]}},
      "fixed_rows": {"any": [{"integer": [1, 65536]}, {"null": []}]},
      "fixed_tokens": {"list": {"integer": [1, 16777216]}},
      "moves_every": {"any": [{"integer": [1, 16777216]}, {"null": []}]},
      "drifts_from": {"any": [{"integer": [0, 9007199254740991]}, {"null": []}]},
      "rounding": {"number": [0, 0.0125]},
      "mean_rounding": {"number": [0, 0.0125]},
      "original_difference": {"any": [{"number": [-1, 1000000000000000.0]}, {"null": []}]},
      "equals_up_to": {"any": [{"integer": [1, 16777216]}, {"null": []}]},
      "memory_shapes": {"list": {"list": {"integer": [0, 16777216]}}},
      "inputs": {
        "list": {
          "object": {
            "name": {"text": []},
            "dtype": {"choice": ["int64", "int32", "float32", "float16", "int8"]},
            "shape": {"list": {"any": [{"integer": [0, 33554432]}, {"text": []}]}},
            "ids": {"any": [{"integer": [1, 16777216]}, {"null": []}]},
            "present": {"any": [{"text": []}, {"null": []}]},
            "when": {"any": [{"text": []}, {"null": []}]}
          },
          "absent": {"ids": null, "present": null, "when": null}
        }
      },
      "outputs": {
        "list": {
          "object": {
            "name": {"text": []},
            "dtype": {"choice": ["int64", "int32", "float32", "float16", "int8"]},
            "shape": {"list": {"any": [{"integer": [0, 33554432]}, {"text": []}]}},
            "ids": {"any": [{"integer": [1, 16777216]}, {"null": []}]},
            "present": {"any": [{"text": []}, {"null": []}]},
            "when": {"any": [{"text": []}, {"null": []}]}
          },
          "absent": {"ids": null, "present": null, "when": null}
        }
      },
      "not_compared": {
        "list": {
          "text": [
            "the name of a file in its folder",
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_",
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-",
            1,
            100
          ]
        }
      },
      "memory_identity": {
        "object": {
          "layout": {
            "text": ["64 lower-case hexadecimal digits", "0123456789abcdef", "0123456789abcdef", 64, 64]
          },
          "weights": {
            "text": ["64 lower-case hexadecimal digits", "0123456789abcdef", "0123456789abcdef", 64, 64]
          }
        },
        "absent": {}
      },
      "producer": {"map": [{"text": []}, {"text": []}]},
      "source": {"map": [{"text": []}, {"text": []}]},
      "files": {
        "map": [
          {
            "text": [
              "the name of a file in its folder",
              "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_",
              "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-",
              1,
              100
            ]
          },
          {
            "object": {
              "sha256": {
                "text": [
                  "64 lower-case hexadecimal digits",
                  "0123456789abcdef",
                  "0123456789abcdef",
                  64,
                  64
                ]
              },
              "num_bytes": {"integer": [0, 9007199254740991]}
            },
            "absent": {}
          }
        ]
      },
      "digest": {
        "text": ["64 lower-case hexadecimal digits", "0123456789abcdef", "0123456789abcdef", 64, 64]
      }
    },
    "absent": {
      "schema": 1,
      "target": "onnxruntime",
      "exporter": "graph",
      "memory_precision": "fp32",
      "answers": "exported",
      "tolerance": 0.0,
      "mean_tolerance": 0.0,
      "measured": null,
      "concern": null,
      "trained_tokens": null,
      "storage": "external",
      "without": [],
      "fixed_rows": null,
      "fixed_tokens": [],
      "moves_every": null,
      "drifts_from": null,
      "rounding": 0.0,
      "mean_rounding": 0.0,
      "original_difference": null,
      "equals_up_to": null,
      "memory_shapes": [],
      "inputs": [],
      "outputs": [],
      "not_compared": [],
      "files": {}
    }
  },
  "reference": {
    "object": {
      "tokens": {"list": {"list": {"integer": [0, 16777216]}}},
      "segments": {"list": {"integer": [1, 16777216]}},
      "restarts": {"list": {"list": {"boolean": []}}},
      "log_probs": {
        "object": {
          "file": {"choice": ["reference.bin"]},
          "dtype": {"choice": ["float32", "int64"]},
          "shape": {"list": {"integer": [0, 9007199254740991]}},
          "offset": {"integer": [0, 9007199254740991]}
        },
        "absent": {}
      },
      "last": {
        "object": {
          "file": {"choice": ["reference.bin"]},
          "dtype": {"choice": ["float32", "int64"]},
          "shape": {"list": {"integer": [0, 9007199254740991]}},
          "offset": {"integer": [0, 9007199254740991]}
        },
        "absent": {}
      }
    },
    "absent": {}
  },
  "step_reference": {
    "object": {
      "segments": {"list": {"integer": [1, 16777216]}},
      "restarts": {"list": {"list": {"boolean": []}}},
      "inputs": {
        "map": [
          {"text": []},
          {
            "object": {
              "file": {"choice": ["reference.bin"]},
              "dtype": {"choice": ["float32", "int64"]},
              "shape": {"list": {"integer": [0, 9007199254740991]}},
              "offset": {"integer": [0, 9007199254740991]}
            },
            "absent": {}
          }
        ]
      },
      "outputs": {
        "map": [
          {"text": []},
          {
            "object": {
              "file": {"choice": ["reference.bin"]},
              "dtype": {"choice": ["float32", "int64"]},
              "shape": {"list": {"integer": [0, 9007199254740991]}},
              "offset": {"integer": [0, 9007199254740991]}
            },
            "absent": {}
          }
        ]
      }
    },
    "absent": {}
  },
  "sizes": ["layers", "heads", "head_dim", "d_model", "vocab_size"],
  "selective_from": 8192,
  "language_model": {
    "plain": [
      [
        {"name": "input_ids", "dtype": "int64", "shape": ["batch", "tokens"]},
        {"name": "position_ids", "dtype": "int64", "shape": ["batch", "tokens"]}
      ],
      [{"name": "logits", "dtype": "float32", "shape": ["batch", "tokens", "vocab_size"]}]
    ],
    "selective": [
      [
        {"name": "input_ids", "dtype": "int64", "shape": ["batch", "tokens"]},
        {"name": "position_ids", "dtype": "int64", "shape": ["batch", "tokens"]},
        {"name": "targets", "dtype": "int64", "shape": ["batch", "tokens"]},
        {"name": "logit_rows", "dtype": "int64", "shape": ["rows"]}
      ],
      [
        {"name": "logits", "dtype": "float32", "shape": ["rows", "vocab_size"]},
        {"name": "log_probs", "dtype": "float32", "shape": ["batch", "tokens"]}
      ]
    ]
  },
  "forms": {
    "ring": {
      "holds": "keys",
      "tensors": [
        ["past_key_values.{}.key", "present.{}.key"],
        ["past_key_values.{}.value", "present.{}.value"]
      ],
      "axes": ["heads", "slots", "head_dim"],
      "circular": true
    },
    "shift": {
      "holds": "keys",
      "tensors": [
        ["past_key_values.{}.key", "present.{}.key"],
        ["past_key_values.{}.value", "present.{}.value"]
      ],
      "axes": ["heads", "mem_len", "head_dim"],
      "circular": false
    },
    "hidden": {
      "holds": "hidden",
      "tensors": [["past_hidden.{}", "present_hidden.{}"]],
      "axes": ["mem_len", "d_model"],
      "circular": false
    },
    "own": {
      "holds": "own",
      "tensors": [["past_state.{}", "present_state.{}"]],
      "axes": [],
      "circular": false
    }
  },
  "name": {
    "text": [
      "letters, digits, _ and -",
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_",
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-",
      1,
      100
    ]
  },
  "group_step": 64,
  "max_axes": 8,
  "max_value": 1000000000,
  "max_states": 16384,
  "max_row_bytes": 1000000000000,
  "memory_types": {"fp32": "float32", "fp16": "float16", "int8": "int8"},
  "cuts_change_nothing": {"same-length": true, "full": false},
  "limits": {
    "fp32 fp32 onnxruntime": ["exported", 0.0001, 0.0001],
    "fp32 fp32 tensorrt": ["exported", 0.0001, 0.0001],
    "fp32 fp32 web": ["exported", 0.0001, 0.0001],
    "fp32 fp16 onnxruntime": ["exported", 0.05, 0.01],
    "fp32 fp16 tensorrt": ["exported", 0.05, 0.01],
    "fp32 fp16 web": ["exported", 0.05, 0.01],
    "fp32 int8 onnxruntime": ["memory-in-bytes", 0.02, 0.002],
    "fp32 int8 tensorrt": ["memory-in-bytes", 0.02, 0.002],
    "fp32 int8 web": ["memory-in-bytes", 0.02, 0.002],
    "fp16 fp32 onnxruntime": ["exported", 0.05, 0.01],
    "fp16 fp32 tensorrt": ["exported", 0.05, 0.01],
    "fp16 fp32 web": ["exported", 0.05, 0.01],
    "fp16 fp16 onnxruntime": ["exported", 0.05, 0.01],
    "fp16 fp16 tensorrt": ["exported", 0.05, 0.01],
    "fp16 fp16 web": ["exported", 0.05, 0.01],
    "fp16 int8 onnxruntime": ["memory-in-bytes", 0.05, 0.01],
    "fp16 int8 tensorrt": ["memory-in-bytes", 0.05, 0.01],
    "fp16 int8 web": ["memory-in-bytes", 0.05, 0.01],
    "int8-stored fp32 onnxruntime": ["stored-weights", 0.0001, 0.0001],
    "int8-stored fp32 tensorrt": ["stored-weights", 0.05, 0.01],
    "int8-stored fp32 web": ["stored-weights", 0.0001, 0.0001],
    "int8-stored fp16 onnxruntime": ["stored-weights", 0.05, 0.01],
    "int8-stored fp16 tensorrt": ["stored-weights", 0.05, 0.01],
    "int8-stored fp16 web": ["stored-weights", 0.05, 0.01],
    "int8-stored int8 onnxruntime": ["stored-weights", 0.5, 0.05],
    "int8-stored int8 tensorrt": ["stored-weights", 0.5, 0.05],
    "int8-stored int8 web": ["stored-weights", 0.5, 0.05],
    "int8 fp32 onnxruntime": ["stored-weights", 0.5, 0.05],
    "int8 fp32 tensorrt": ["stored-weights", 0.05, 0.01],
    "int8 fp32 web": ["stored-weights", 0.5, 0.05],
    "int8 fp16 onnxruntime": ["stored-weights", 0.5, 0.05],
    "int8 fp16 tensorrt": ["stored-weights", 0.05, 0.01],
    "int8 fp16 web": ["stored-weights", 0.5, 0.05],
    "int8 int8 onnxruntime": ["stored-weights", 0.5, 0.05],
    "int8 int8 tensorrt": ["stored-weights", 0.5, 0.05],
    "int8 int8 web": ["stored-weights", 0.5, 0.05],
    "int4 fp32 onnxruntime": ["stored-weights", 0.5, 0.05],
    "int4 fp32 tensorrt": ["stored-weights", 0.05, 0.01],
    "int4 fp32 web": ["stored-weights", 0.5, 0.05],
    "int4 fp16 onnxruntime": ["stored-weights", 0.5, 0.05],
    "int4 fp16 tensorrt": ["stored-weights", 0.05, 0.01],
    "int4 fp16 web": ["stored-weights", 0.5, 0.05],
    "int4 int8 onnxruntime": ["stored-weights", 0.5, 0.05],
    "int4 int8 tensorrt": ["stored-weights", 0.5, 0.05],
    "int4 int8 web": ["stored-weights", 0.5, 0.05]
  },
  "roundings": 16,
  "graph_files": {
    "external": ["step.onnx", "weights.bin"],
    "single-file": ["step.onnx"],
    "ort": ["step.ort"],
    "fused-ort": ["fused.ort"]
  },
  "external_files": ["fused.onnx", "weights.bin"],
  "needed": ["reference.json", "reference.bin"],
  "vocabulary": "vocab.json"
})json";

}  // namespace xl_export::detail

#endif
