"""The public corpora: where their files are, which sizes and hashes are known, and how they become tokens.

| corpus          | tokens: training, validation, test      | vocabulary |
|-----------------|-----------------------------------------|------------|
| enwik8          | 90,000,000 · 5,000,000 · 5,000,000      | 256 bytes  |
| text8           | 90,000,000 · 5,000,000 · 5,000,000      | 27         |
| wikitext-103    | 103,227,021 · 217,646 · 245,569         | 267,735    |
| one-billion-word| about 799,000,000 in 30,301,028 sentences| 793,470   |
| penn-treebank   | 929,589 · 73,760 · 82,430               | 10,000     |

Where these differ from the public Transformer-XL code:
- enwik8: every byte is a token, newlines too. The public loader splits the text into lines and drops the
  newlines, so its scores are over about 1 % fewer symbols.
- text8: the blank is a symbol itself (`_` in the public code), and symbols are in the order of the alphabet
  (of frequency in the public code).
- WikiText-103: each newline is `<eos>`, words are ordered by their frequency in the training part, and
  equally frequent words by their first appearance. The ids are the same as in the public code. Penn Treebank
  is treated alike, but the public code counts its words in all three parts.
- One Billion Word: there is one `<S>` between sentences, before the first and after the last, in the order of
  the shards. Read as one stream, this predicts what the public code predicts sentence by sentence: each word
  and each sentence's end. The public code shuffles the sentences in each epoch. Words that appear three times
  or more are kept, as in the public list of 793,471, which also counts a `</S>`. The public order among
  equally frequent words is not known, so ids differ. The test part is the held-out shard 0 as everywhere.
  Validation is shard 1 here and shard 0 in the public code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from runtimes.contract.vocabulary import VocabKind
from trainer.run.choices import CorpusName

WHOLE = "all"  # the only part of a corpus that is one file, which is cut 90/5/5


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What is known of one file, or of several joined; None is not known. Hashes are hexadecimal."""

    num_files: int | None = 1
    num_bytes: int | None = None
    lines: int | None = None
    md5: str | None = None
    sha1: str | None = None
    sha256: str | None = None

    @property
    def hashed(self) -> bool:
        return bool(self.md5 or self.sha1 or self.sha256)

    def differs(self, published: Fingerprint) -> str | None:
        """The name of the first published fact that is another one here, or None."""
        facts = ("num_files", "num_bytes", "lines", "md5", "sha1", "sha256")
        return next((f for f in facts if getattr(published, f) not in (None, getattr(self, f))), None)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The description of one corpus."""

    name: CorpusName
    kind: VocabKind
    parts: dict[str, tuple[str, ...]]
    """The file names of each part, as shell patterns. The published name comes first; then comes `train.txt`
    or the like, which the public script writes. A corpus that is cut 90/5/5 has the only part `all`.
    """
    files: dict[str, Fingerprint]  # what is known of each part
    archive_name: str
    archive: Fingerprint  # what is known of the published archive
    urls: tuple[str, ...]  # where the archive is or was; they are tried in turn
    max_bytes: int = 1 << 30  # the archive unpacks to less
    min_count: int = 1  # words that appear less often are `unknown`
    unknown: str = "<unk>"
    end_of_line: str = "<eos>"  # the token of each newline
    bounded: bool = False  # whether that token also precedes the first line

    def wants(self, member: str) -> bool:
        """Whether a file of this name may belong to the corpus."""
        return any(_matches(member, pattern) for patterns in self.parts.values() for pattern in patterns)

    def matching(self, part: str, members: Iterable[str]) -> list[str]:
        """The sorted names that match the first pattern of `part` that any of `members` matches."""
        members = sorted(members)
        found = ([member for member in members if _matches(member, pattern)] for pattern in self.parts[part])
        return next((names for names in found if names), [])


def _matches(member: str, pattern: str) -> bool:
    return fnmatchcase("/" + member, "*/" + pattern)


def _three(pattern: str) -> dict[str, tuple[str, ...]]:
    return {part: (pattern.format(part), f"{part}.txt") for part in ("train", "valid", "test")}


HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout"


# Sources of the hashes: mattmahoney.net/dc/textdata.html for enwik8; torchtext and others for text8, Penn
# Treebank and the archive of WikiText-103; GluonNLP for the files of WikiText-103; TensorFlow Datasets for
# One Billion Word. Other sizes of archives are from TensorFlow's tutorials. No hash of a shard of One Billion
# Word is public, but the number of shards and of lines is (lingvo, TensorFlow Datasets).
CORPORA: dict[str, Corpus] = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            name="enwik8",
            kind="byte",
            parts={WHOLE: ("enwik8",)},
            files={
                WHOLE: Fingerprint(
                    num_bytes=100_000_000,
                    md5="a1fa5ffddb56f4953e226637dabbb36a",
                    sha1="57b8363b814821dc9d47aa4d41f58733519076b2",
                )
            },
            archive_name="enwik8.zip",
            archive=Fingerprint(
                num_bytes=36_445_475,
                sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            ),
            urls=("https://mattmahoney.net/dc/enwik8.zip",),
        ),
        Corpus(
            name="text8",
            kind="char",
            parts={WHOLE: ("text8",)},
            files={WHOLE: Fingerprint(num_bytes=100_000_000, md5="3bea1919949baf155f99411df5fada7e")},
            archive_name="text8.zip",
            archive=Fingerprint(
                num_bytes=31_344_016,
                sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
            ),
            urls=("https://mattmahoney.net/dc/text8.zip",),
        ),
        Corpus(
            name="wikitext-103",
            kind="word",
            parts=_three("wiki.{}.tokens"),
            files={
                "train": Fingerprint(sha1="b7497e2dfe77e72cfef5e3dbc61b7b53712ac211"),
                "valid": Fingerprint(sha1="c326ac59dc587676d58c422eb8a03e119582f92b"),
                "test": Fingerprint(sha1="8a5befc548865cec54ed4273cf87dbbad60d1e47"),
            },
            archive_name="wikitext-103-v1.zip",
            archive=Fingerprint(
                md5="9ddaacaf6af0710eda8c456decff7832", sha1="0aec09a7537b58d4bb65362fee27650eeaba625a"
            ),
            urls=(
                "https://wikitext.smerity.com/wikitext-103-v1.zip",
                "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
            ),
        ),
        Corpus(
            name="one-billion-word",
            kind="word",
            parts={
                "train": ("training-monolingual.tokenized.shuffled/news.en-*-of-00100",),
                "valid": (f"{HELD_OUT}-00001-of-00050",),
                "test": (f"{HELD_OUT}-00000-of-00050",),
            },
            files={
                "train": Fingerprint(num_files=99, lines=30_301_028),
                "valid": Fingerprint(lines=6_206),
                "test": Fingerprint(lines=6_075),
            },
            archive_name="1-billion-word-language-modeling-benchmark-r13output.tar.gz",
            archive=Fingerprint(
                num_bytes=1_792_209_805,
                sha256="01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
            ),
            urls=(
                "https://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
            ),
            max_bytes=1 << 33,
            min_count=3,
            unknown="<UNK>",
            end_of_line="<S>",
            bounded=True,
        ),
        Corpus(
            name="penn-treebank",
            kind="word",
            parts=_three("ptb.{}.txt"),
            files={
                "train": Fingerprint(md5="f26c4b92c5fdc7b3f8c7cdcb991d8420"),
                "valid": Fingerprint(md5="aa0affc06ff7c36e977d7cd49e3839bf"),
                "test": Fingerprint(md5="8b80168b89c18661a38ef683c0dc3721"),
            },
            archive_name="simple-examples.tgz",
            archive=Fingerprint(num_bytes=34_869_662),
            urls=("http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",),
        ),
    )
}
