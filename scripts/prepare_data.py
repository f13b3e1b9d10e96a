#!/usr/bin/env python3
"""Token files for qshard from text or JSONL files and a Hugging Face tokenizer.json.

Writes the HDF5 format of include/io/dataset.h, as `qshard data tokenize` does for bytes. A document
is a line of a JSONL file (.jsonl, .json, also with .gz), a whole text file, or, with --separator, a
part of a text file. Each document ends with the end-of-text token. Validation documents are chosen
by a hash of their name (file name and number), so adding files moves none.

Memory stays bounded: texts are read in pieces, and documents longer than a piece are tokenized in
several, cut at a line end. Tokens are collected in an unnamed temporary file beside the output.

Examples:
  scripts/prepare_data.py --tokenizer tokenizer.json --out train.h5 --val-out val.h5 books/*.txt
  scripts/prepare_data.py --tokenizer tokenizer.json --out c4.h5 --text-field text c4/*.jsonl.gz
  scripts/prepare_data.py --tokenizer tokenizer.json --out t.h5 --separator '<|endoftext|>' t.txt
"""
import argparse
import array
import gzip
import hashlib
import json
import os
import sys
import tempfile
import time

try:
    import h5py
    import numpy as np
    from tokenizers import Tokenizer
except ImportError as missing:
    sys.exit(f"prepare_data.py: {missing}\ninstall the libraries it needs:\n"
             "  python3 -m venv .venv && .venv/bin/pip install tokenizers h5py numpy\n"
             "and run it with .venv/bin/python")

PIECE_CHARS = 1 << 20   # of text that is tokenized as one string
BATCH_CHARS = 8 << 20   # of text that is tokenized by one call, on all cores
COPY_TOKENS = 1 << 22   # tokens in memory while the HDF5 file is written
END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>")


class TokenWriter:
    """One token file: add(), end_document(), and finish(), which publishes it."""

    def __init__(self, path, tokenizer, vocab_size, source):
        self.path, self.source = path, source
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.spool = tempfile.TemporaryFile(dir=os.path.dirname(path) or ".")
        self.offsets = array.array("Q")
        self.tokens = self.document_begin = 0

    def add(self, ids):
        self.spool.write(np.asarray(ids, dtype="<u4").tobytes())  # numpy refuses what does not fit
        self.tokens += len(ids)

    def end_document(self, end):
        """`end`: the token that ends it, or None. A document without text is left out."""
        if self.tokens == self.document_begin:
            return
        if end is not None:
            self.add([end])
        self.offsets.append(self.document_begin)
        self.document_begin = self.tokens

    def finish(self):
        temporary = f"{self.path}.tmp-{os.getpid()}"
        try:
            with h5py.File(temporary, "w") as file:
                self.write_hdf5(file)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)
        print(f"{self.path}: {self.tokens} tokens, {len(self.offsets)} documents, "
              f"vocabulary {self.vocab_size}")

    def write_hdf5(self, file):
        file.attrs["format"] = "qshard-tokens"
        file.attrs["version"] = np.int64(1)
        file.attrs["vocab_size"] = np.int64(self.vocab_size)
        file.attrs["tokenizer"] = self.tokenizer
        file.attrs["source"] = self.source
        file["document_offsets"] = np.frombuffer(self.offsets, dtype="<u8")
        tokens = file.create_dataset("tokens", (self.tokens,), dtype="<u4")  # contiguous
        self.spool.seek(0)
        for first in range(0, self.tokens, COPY_TOKENS):
            n = min(COPY_TOKENS, self.tokens - first)
            tokens[first:first + n] = np.frombuffer(self.spool.read(4 * n), dtype="<u4")


def open_text(path):
    opener = gzip.open if path.endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8", newline="")


def cut(text):
    """Pieces of the text, cut at line ends, and the rest of at most one piece."""
    pieces = []
    while len(text) > PIECE_CHARS:
        end = text.rfind("\n", 0, PIECE_CHARS) + 1 or PIECE_CHARS
        pieces.append(text[:end])
        text = text[end:]
    return pieces, text


def pieces_of(number, text):
    """(number of the document in the file, text, whether it is the document's last piece)"""
    pieces, rest = cut(text)
    for piece in pieces:
        yield number, piece, False
    yield number, rest, True


def text_documents(path, separator):
    number, rest = 0, ""
    keep = len(separator) if separator else 0  # a separator may lie across two blocks
    with open_text(path) as file:
        while block := file.read(PIECE_CHARS):
            rest += block
            *whole, rest = rest.split(separator) if separator else [rest]
            for text in whole:
                yield from pieces_of(number, text)
                number += 1
            settled = max(0, len(rest) - keep)
            pieces, tail = cut(rest[:settled])
            for piece in pieces:
                yield number, piece, False
            rest = tail + rest[settled:]
    yield from pieces_of(number, rest)


def jsonl_documents(path, field):
    with open_text(path) as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                text = record[field]
            except json.JSONDecodeError as error:
                sys.exit(f"{path}: line {number + 1}: not valid JSON: {error}")
            except (KeyError, TypeError):
                found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                sys.exit(f"{path}: line {number + 1}: no field '{field}' (found: {found}); "
                         "see --text-field")
            if not isinstance(text, str):
                sys.exit(f"{path}: line {number + 1}: field '{field}' is no text")
            yield from pieces_of(number, text)


def documents(path, args):
    plain = path.removesuffix(".gz")
    named_jsonl = plain.endswith((".jsonl", ".json"))
    jsonl = named_jsonl if args.format == "auto" else args.format == "jsonl"
    try:
        yield from jsonl_documents(path, args.text_field) if jsonl else text_documents(
            path, args.separator)
    except UnicodeDecodeError as error:
        sys.exit(f"{path}: not UTF-8 text: {error}")
    except OSError as error:
        sys.exit(f"{path}: {error}")


def is_validation(name, fraction):
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


class Progress:
    """A line about every second on a terminal, every 30 seconds elsewhere."""

    def __init__(self):
        self.start = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.chars = 0

    def update(self, chars, tokens, final=False):
        self.chars += chars
        now = time.monotonic()
        if not final and now - self.last < (1 if self.terminal else 30):
            return
        self.last = now
        rate = self.chars / 1e6 / max(now - self.start, 1e-9)
        line = f"{self.chars / 1e6:.1f} M characters, {tokens} tokens, {rate:.2f} M characters/s"
        end = "\r" if self.terminal and not final else "\n"
        print(line, end=end, file=sys.stderr, flush=True)


def load_tokenizer(args):
    """The tokenizer, the id that ends a document (or None), and the size of the vocabulary."""
    try:
        tokenizer = Tokenizer.from_file(args.tokenizer)
    except Exception as error:  # the library raises plain Exception
        sys.exit(f"{args.tokenizer}: not a tokenizer.json: {error}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    names = (args.eos,) if args.eos else END_OF_TEXT
    end = next((i for i in map(tokenizer.token_to_id, names) if i is not None), None)
    if args.eos == "none":
        end = None
    elif end is None:
        sys.exit(f"{args.tokenizer}: none of {', '.join(names)} is a token; name the end-of-text "
                 "token with --eos, or --eos none")
    needed = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if args.vocab_size and args.vocab_size < needed:
        sys.exit(f"--vocab-size {args.vocab_size}: the tokenizer has ids up to {needed - 1}")
    return tokenizer, end, args.vocab_size or needed


def run(args):
    tokenizer, end, vocab_size = load_tokenizer(args)
    source = " ".join(args.files)[:4096]  # HDF5 holds attributes of at most 64 kB
    train = TokenWriter(args.out, args.tokenizer, vocab_size, source)
    val = TokenWriter(args.val_out, args.tokenizer, vocab_size, source) if args.val_out else None
    progress = Progress()

    def write(batch):
        for (writer, text, last), encoding in zip(
                batch, tokenizer.encode_batch([text for _, text, _ in batch],
                                              add_special_tokens=False)):
            writer.add(encoding.ids)
            if last:
                writer.end_document(end)
        progress.update(sum(len(text) for _, text, _ in batch),
                        train.tokens + (val.tokens if val else 0))

    batch, chars = [], 0
    for path in args.files:
        for number, text, last in documents(path, args):
            key = f"{os.path.basename(path)}:{number}"
            writer = val if val and is_validation(key, args.val_fraction) else train
            # A writer's pieces stay in order, because a batch is written in order.
            batch.append((writer, text, last))
            chars += len(text)
            if chars >= BATCH_CHARS or len(batch) >= 1 << 16:
                write(batch)
                batch, chars = [], 0
    write(batch)
    progress.update(0, train.tokens + (val.tokens if val else 0), final=True)
    writers = [train] + ([val] if val else [])
    for writer in writers:
        if not writer.tokens:
            sys.exit(f"{writer.path}: no document was found for it; use more files or another "
                     "--val-fraction")
    for writer in writers:
        writer.finish()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="text or JSONL files")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of Hugging Face")
    parser.add_argument("--out", required=True, help="token file to write")
    parser.add_argument("--val-out", help="token file of the validation documents")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="of the documents (0.05)")
    parser.add_argument("--format", choices=("auto", "text", "jsonl"), default="auto",
                        help="auto: by the file name")
    parser.add_argument("--text-field", default="text", help="of a JSONL record (text)")
    parser.add_argument("--separator", help="between the documents of a text file")
    parser.add_argument("--eos", help="end-of-text token, or none "
                        f"(the first known of {' '.join(END_OF_TEXT)})")
    parser.add_argument("--vocab-size", type=int, default=0,
                        help="of the model, if larger than the tokenizer's: 151936 for Qwen3")
    args = parser.parse_args()
    if not 0 <= args.val_fraction <= 1:
        parser.error(f"--val-fraction {args.val_fraction}: expected 0 to 1")
    run(args)


if __name__ == "__main__":
    main()
