"""qshard walkthrough and --trace: numbers of the README's layer, sums of odd ones, activations
against a plain float64 computation, and what is written."""
import html.parser
import json
import math
import re
import shutil
import struct
import unicodedata

import cli
import qwen3_reference
import runs
from qwen3_reference import rms_norm, rotate

REFERENCE = cli.ROOT / "test" / "reference"
# Rows, columns and a rank's elements of the layer in the README, on 4 ranks.
LAYER = {
    "input_layernorm": ([512], [128], 128),
    "self_attn.q_proj": ([512, 512], [128, 512], 65536),
    "self_attn.k_proj": ([256, 512], [64, 512], 32768),
    "self_attn.v_proj": ([256, 512], [64, 512], 32768),
    "self_attn.q_norm": ([64], [16], 16),
    "self_attn.k_norm": ([64], [16], 16),
    "self_attn.o_proj": ([512, 512], [128, 512], 65536),
    "post_attention_layernorm": ([512], [128], 128),
    "mlp.gate_proj": ([1024, 512], [256, 512], 131072),
    "mlp.up_proj": ([1024, 512], [256, 512], 131072),
    "mlp.down_proj": ([512, 1024], [128, 1024], 131072),
}
TOTAL, SHARD, RING = 2360448, 590112, 3540672  # elements; elements; bytes of 16-bit numbers
KINDS = ("gather_logical_bytes", "gather_copied_bytes", "reduce_logical_bytes",
         "reduce_copied_bytes", "all_reduce_logical_bytes", "all_reduce_copied_bytes")


def walk(*args, ranks=4, rc=0):
    result = cli.qshard("walkthrough", *args, "--format", "json", ranks=ranks)
    cli.expect(result, rc=rc)
    return json.loads(result.out)


def step(doc, phase, number):
    return next(s for s in doc["steps"] if (s["phase"], s["number"]) == (phase, number))


def failed(doc):
    return [c["name"] for c in doc["checks"] if not c["ok"]]


def adds_up(doc):
    """Sums that hold for any model, ranks and batch."""
    ranks, replicas = doc["setting"]["ranks"], doc["setting"]["replicas"]
    for unit in doc["units"]:
        assert unit["elements"] == sum(p["elements"] for p in unit["parameters"])
        for p in unit["parameters"]:
            assert p["elements"] == math.prod(p["shape"])
            assert [s["rank"] for s in p["shards"]] == list(range(ranks))
            for replica in range(replicas):
                shards = [s for s in p["shards"] if s["replica"] == replica]
                assert sum(s["elements"] for s in shards) == p["elements"], p
                row = 0
                for s in shards:
                    assert s["elements"] == math.prod(s["shape"])
                    assert s["first_row"] == row or s["shape"][0] == 0
                    row += s["shape"][0]
                assert row == p["shape"][0]
        for r in range(ranks):
            assert unit["elements_of_rank"][r] == sum(
                p["shards"][r]["elements"] for p in unit["parameters"])
    assert sum(u["elements"] for u in doc["units"]) == doc["setting"]["parameters"]
    moved = doc["communication"]
    for kind in KINDS:
        for r in range(ranks):
            assert moved["total"][kind][r] == sum(u[kind][r] for u in moved["units"])
    told = moved["units"][doc["setting"]["unit"]]
    for r in range(ranks):
        for phase, number, kinds in (("forward", "0", "gather"), ("backward", "12", "reduce")):
            share = step(doc, phase, number)["logical_bytes"][r]
            again = step(doc, "backward", "0")["logical_bytes"][r] if kinds == "gather" else 0
            assert told[kinds + "_logical_bytes"][r] == share + again
        spans = doc["timeline"][r]["spans"]
        assert sum(s["logical_bytes"] for s in spans if s["lane"] in ("gather", "reduce")) == \
            sum(moved["total"][kind][r] for kind in KINDS if "logical" in kind)


def test_units_of_several_layers(tmp):
    """The told layer in its unit, which is gathered and reduced as one; the last unit has fewer."""
    model = json.loads((cli.ROOT / "data" / "configs" / "walkthrough-layer.json").read_text())
    (tmp / "m.json").write_text(json.dumps({**model, "num_hidden_layers": 5}))
    args = ("--model", tmp / "m.json", "--layers-per-unit", 3)
    for layer, name, layers, after in ((1, "layers.0-2", 3, "layers.2"), (2, "layers.0-2", 3, "layers.3"),
                                       (4, "layers.3-4", 2, "root")):
        doc = walk(*args, "--layer", layer)
        assert doc["ok"] and not failed(doc)
        adds_up(doc)
        assert [u["name"] for u in doc["units"]] == ["root", "layers.0-2", "layers.3-4"]
        unit = doc["units"][doc["setting"]["unit"]]
        assert unit["name"] == name and len(unit["parameters"]) == 11 * layers, unit
        for phase, number in (("forward", "0"), ("backward", "0"), ("backward", "12")):
            assert step(doc, phase, number)["logical_bytes"] == [layers * RING] * 4
        assert doc["transition"]["to"] == after, doc["transition"]
        began = doc["transition"].get("next_gather_began_ns_before_layer")
        assert (began is not None) == (layer == 2), doc["transition"]
        for s in doc["steps"]:
            if s["lane"] == "compute" and s["same_pass_as"] is None:
                assert s["calls"] > 0 and (s["phase"] == "optimizer" or s["calls"] < 12), s
    result = cli.qshard("walkthrough", *args, "--tensor", "q_proj", "--values", "--layer", 1,
                        "--html", tmp / "w.html", ranks=2)
    cli.expect(result, out="model.layers.1.self_attn.q_proj.weight [512, 512] on its way")
    assert "Parameters of layers.0-2" in result.out and " 1.mlp.up_proj" in result.out, result
    result = cli.qshard("walkthrough", "--layers-per-unit", 3, ranks=2)
    runs.expect_one_error(result, 2, "fsdp.layers_per_unit 3", "1 to 2")


def test_numbers_of_the_table(tmp):
    for transport in ("shm", "mpi"):
        doc = walk("--transport", transport)
        assert doc["ok"] and not failed(doc)
        adds_up(doc)
        unit = doc["units"][1]
        assert (unit["elements"], unit["bytes"]) == (TOTAL, 2 * TOTAL)
        assert unit["elements_of_rank"] == [SHARD] * 4
        assert unit["buffer_bytes_of_rank"] == [2 * SHARD] * 4
        assert len(unit["parameters"]) == len(LAYER)
        for p in unit["parameters"]:
            shape, shard, elements = LAYER[p["name"].removeprefix("model.layers.0.")
                                           .removesuffix(".weight")]
            assert p["shape"] == shape
            assert [s["shape"] for s in p["shards"]] == [shard] * 4
            assert [s["elements"] for s in p["shards"]] == [elements] * 4
            assert [s["bytes"] for s in p["shards"]] == [2 * elements] * 4
        for phase, number in (("forward", "0"), ("backward", "0"), ("backward", "12")):
            s = step(doc, phase, number)
            assert s["logical_bytes"] == [RING] * 4, s
            in_place = transport == "shm" and number == "0"
            assert s["copied_bytes"] == [0 if in_place else RING] * 4, s
        for phase, before, after in (("forward", 2 * SHARD, 2 * TOTAL), ("backward", 2 * SHARD, 2 * TOTAL)):
            s = step(doc, phase, "0")
            assert (s["unit_before"], s["unit_after"]) == ([before] * 4, [after] * 4)
            s = step(doc, phase, "11")
            assert (s["unit_before"], s["unit_after"]) == ([after] * 4, [before] * 4)
        layer = doc["communication"]["units"][1]
        assert layer["gather_logical_bytes"] == [2 * RING] * 4
        assert layer["reduce_logical_bytes"] == [RING] * 4
        for number in map(str, range(1, 11)):
            s = step(doc, "forward", number)
            assert s["logical_bytes"] == s["copied_bytes"] == [0] * 4
        qkv = step(doc, "forward", "2")
        assert qkv["flops"] == 2 * 16 * 512 * 1024
        assert [[t["role"], t["shape"]] for t in qkv["operators"][0]["tensors"]] == [
            ["in", [16, 512]], ["weight", [1024, 512]], ["out", [16, 1024]]]
        mlp = step(doc, "forward", "9")
        assert [op["name"] for op in mlp["operators"]] == ["linear", "swiglu", "linear"]
        assert step(doc, "forward", "4")["same_pass_as"] == "3"


def test_odd_shapes_add_up(tmp):
    path = runs.model(tmp, vocab_size=61, num_hidden_layers=3)
    for ranks, args in ((3, ()), (2, ("--accumulate", 3, "--reduce-every-microbatch", "false")),
                        (5, ("--transport", "mpi", "--prefetch", 2, "--accumulate", 2)),
                        (1, ("--param-dtype", "f32", "--reshard-after-forward", "false"))):
        doc = walk("--model", path, "--layer", 2, "--batch", 1, "--seq", 7, *args, ranks=ranks)
        assert doc["ok"], failed(doc)
        adds_up(doc)
    config = REFERENCE / "empty-shards" / "config.json"
    doc = walk("--model", config, "--batch", 1, "--seq", 4, ranks=8)
    assert doc["ok"], failed(doc)
    adds_up(doc)
    assert 0 in [s["elements"] for p in doc["units"][1]["parameters"] for s in p["shards"]]


def test_meshes_and_groups(tmp):
    half = TOTAL // 2
    for transport in ("shm", "mpi"):
        doc = walk("--fsdp.mesh", "2x2", "--transport", transport)
        assert doc["ok"], failed(doc)
        adds_up(doc)
        assert doc["units"][1]["elements_of_rank"] == [half] * 4
        total = step(doc, "backward", "12+")
        assert total["among"] == "replicas"
        # A half of the gradient in fp16: reduce-scatter and all-gather send a half of that each.
        assert total["logical_bytes"] == [2 * half] * 4
        assert total["copied_bytes"] == [half if transport == "shm" else 2 * half] * 4
        assert step(doc, "backward", "12")["logical_bytes"] == [2 * half] * 4
        assert doc["communication"]["units"][1]["all_reduces"] == [1] * 4
    path = runs.model(tmp, vocab_size=61, num_hidden_layers=3)
    for ranks, args in (
            (3, ("--mesh", "3x1", "--param-dtype", "bf16")),
            (6, ("--mesh", "2x3", "--accumulate", 2, "--prefetch", 2)),
            (4, ("--mesh", "2x2", "--reshard-after-forward", "false", "--prefetch", 0)),
            (4, ("--transport", "mpi", "--reshard-ranks", 2, "--backward-prefetch", 2)),
            (8, ("--transport", "mpi", "--mesh", "2x4", "--reshard-ranks", 2)),
            (4, ("--reduce-every-microbatch", "false", "--accumulate", 2, "--mesh", "2x2"))):
        doc = walk("--model", path, "--layer", 1, "--batch", 1, "--seq", 7, *args, ranks=ranks)
        assert doc["ok"], failed(doc)
        adds_up(doc)
    assert "12+" not in [s["number"] for s in walk("--model", path, ranks=2)["steps"]]
    result = cli.qshard("walkthrough", "--mesh", "2x2", ranks=4)
    cli.expect(result, out="mesh: 2 replicas of 2 ranks")
    assert all(columns(line) <= 80 for line in result.out.splitlines()), result
    cli.expect(cli.qshard("walkthrough", "--mesh", "2x2", "--format", "md", ranks=4),
               out="all-reduces")
    runs.expect_one_error(cli.qshard("walkthrough", "--mesh", "3x2", ranks=4), 2, "fsdp.mesh 3x2")


def columns(line):
    return sum(not unicodedata.combining(c) for c in line)


def test_text_fits_a_terminal_of_80_columns(tmp):
    for args, ranks in (((), 4), (("--model", runs.model(tmp)), 3),
                        (("--tensor", "up_proj", "--values"), 2)):
        result = cli.qshard("walkthrough", *args, ranks=ranks)
        cli.expect(result, out="walkthrough: ok")
        assert "\033" not in result.out, result
        for line in result.out.splitlines():
            assert columns(line) <= 80, f"{columns(line)} columns: {line}\n{result}"
    result = cli.qshard("walkthrough", ranks=4)
    for text in ("590,112", "4.72 MB", "3.54 MB + 3.54 MB + 3.54 MB = 10.62 MB (10,622,016 bytes)",
                 "1.18 MB → 4.72 MB", "4.72 MB → 1.18 MB", "parameters fp16, gradients travel as fp16"):
        assert text in result.out, f"'{text}' is missing\n{result}"
    result = cli.qshard("walkthrough", "--format", "md", ranks=2)
    cli.expect(result, out="| self_attn.q_proj | [512, 512] | [256, 512] |")
    assert "\033" not in result.out and "FAILED" not in result.out, result


def test_values_on_their_way(tmp):
    doc = walk("--tensor", "k_proj", "--rank", 1, "--values", ranks=2)
    values = doc["values"]
    assert values["tensor"] == "model.layers.0.self_attn.k_proj.weight" and values["rank"] == 1
    stages = {s["stage"]: s for s in values["stages"]}
    assert list(stages) == ["shard", "gathered", "gradient", "reduced", "updated"]
    assert stages["shard"]["rows"] == [128, 256] and stages["gathered"]["rows"] == [0, 256]
    row = {s: {line["row"]: line["values"] for line in stages[s]["lines"]} for s in stages}
    for shard, full in zip(row["shard"][255], row["gathered"][255]):
        assert abs(shard - full) <= max(abs(shard) * 2**-11, 2**-25)  # rounded to fp16
    changes = [abs(a - b) for a, b in zip(row["updated"][128], row["shard"][128])]
    # A first AdamW update moves a weight by the rate, 1e-3, and decays it a little.
    assert all(0.9e-3 < change < 1.1e-3 for change in changes), changes


# --- activations: Qwen3's layer in plain float64

def read_tensors(path):
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    tensors = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            kind = {"F32": "f", "I32": "i"}[entry["dtype"]]
            values = struct.unpack_from(f"<{math.prod(entry['shape'])}{kind}", data,
                                        8 + size + entry["data_offsets"][0])
            tensors[name] = (entry["shape"], values)
    return tensors


def write_tensors(path, tensors):
    header, at, body = {}, 0, b""
    for name, values in tensors.items():
        data = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [at, at + len(data)]}
        at += len(data)
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def dot(a, b):
    return sum(map(float.__mul__, a, b))


def product(rows, weight):
    return [qwen3_reference.product(weight, x) for x in rows]


def add(a, b):
    return [[x + y for x, y in zip(p, q)] for p, q in zip(a, b)]


def attend(q, k, v):
    """One head of one sequence, causal."""
    out = []
    for t, query in enumerate(q):
        scores = [dot(query, key) / math.sqrt(len(query)) for key in k[:t + 1]]
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        total = sum(weights)
        out.append([sum(w * row[d] for w, row in zip(weights, v)) / total
                    for d in range(len(query))])
    return out


def layer_activations(folder):
    c = json.loads((folder / "config.json").read_text())
    H, K, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    eps, theta = c["rms_norm_eps"], c["rope_theta"]
    files = read_tensors(folder / "model.safetensors")

    def weight(name):
        shape, values = files[name]
        values = list(map(float, values))
        return values if len(shape) == 1 else [values[i * shape[1]:(i + 1) * shape[1]]
                                               for i in range(shape[0])]

    def layer(name):
        return weight(f"model.layers.0.{name}.weight")
    (_, _, rows, T), ids = read_tensors(folder / "batches.safetensors")["inputs"]
    embedding = weight("model.embed_tokens.weight")
    x = [embedding[i] for i in ids[:rows * T]]
    found = {"step00_hidden_states": x}
    n = [rms_norm(row, layer("input_layernorm"), eps) for row in x]
    found["step01_input_layernorm"] = n
    heads = {}
    for name, count in (("q", H), ("k", K), ("v", K)):
        found[f"step02_{name}"] = flat = product(n, layer(f"self_attn.{name}_proj"))
        heads[name] = [[row[h * D:(h + 1) * D] for h in range(count)] for row in flat]
        if name == "v":
            continue
        scale = layer(f"self_attn.{name}_norm")
        normed = [[rms_norm(h, scale, eps) for h in row] for row in heads[name]]
        found[f"step03_{name}_norm"] = [sum(row, []) for row in normed]
        heads[name] = [[rotate(h, i % T, theta) for h in row] for i, row in enumerate(normed)]
        found[f"step04_{name}_rope"] = [sum(row, []) for row in heads[name]]
    att = [[] for _ in x]
    for b in range(rows):
        here = range(b * T, (b + 1) * T)
        for h in range(H):
            kv = h // (H // K)
            out = attend([heads["q"][i][h] for i in here], [heads["k"][i][kv] for i in here],
                         [heads["v"][i][kv] for i in here])
            for i, values in zip(here, out):
                att[i] += values
    found["step05_attention"] = att
    found["step06_o_proj"] = delta = product(att, layer("self_attn.o_proj"))
    found["step07_residual"] = mid = add(x, delta)
    n = [rms_norm(row, layer("post_attention_layernorm"), eps) for row in mid]
    found["step08_post_attention_layernorm"] = n
    found["step09_gate"] = gate = product(n, layer("mlp.gate_proj"))
    found["step09_up"] = up = product(n, layer("mlp.up_proj"))
    fused = [[g / (1 + math.exp(-g)) * u for g, u in zip(a, b)] for a, b in zip(gate, up)]
    found["step09_fused"] = fused
    found["step09_mlp"] = mlp = product(fused, layer("mlp.down_proj"))
    found["step10_residual"] = add(mid, mlp)
    return {name: sum(rows, []) for name, rows in found.items()}


def test_activations_operator_by_operator(tmp):
    for case, ranks in (("tiny-tied", 4), ("wide-head-untied", 3)):
        folder = shutil.copytree(REFERENCE / case, tmp / case)
        truth = layer_activations(folder)
        write_tensors(folder / "activations.safetensors", truth)
        for args in (("--param-dtype", "f32"), ("--param-dtype", "bf16", "--transport", "mpi"),
                     ("--param-dtype", "fp16")):
            doc = walk("--reference", folder, *args, ranks=ranks)
            assert doc["ok"], failed(doc)
            compared = [c["name"] for c in doc["checks"] if c["name"].startswith("step")]
            assert sorted(compared) == sorted(f"{name} as in the reference" for name in truth)
    truth["step06_o_proj"][5] += 0.05
    write_tensors(folder / "activations.safetensors", truth)
    doc = walk("--reference", folder, "--param-dtype", "f32", ranks=3, rc=1)
    assert failed(doc) == ["step06_o_proj as in the reference"] and not doc["ok"]
    result = cli.qshard("walkthrough", "--reference", folder, "--param-dtype", "f32", ranks=3)
    cli.expect(result, rc=1, out="✗ FAILED step06_o_proj")
    assert "walkthrough: FAILED 1 of" in result.out, result


def test_wrong_usage(tmp):
    for args, rc, texts in (
            (("--layer", 2), 2, ("--layer 2", "0 to 1")),
            (("--rank", 2, "--values", "--tensor", "q_proj"), 2, ("--rank 2", "0 to 1")),
            (("--values",), 2, ("--tensor",)),
            (("--tensor", "proj", "--values"), 2, ("proj", "q_proj")),
            (("--param-dtype", "fp8"), 2, ("fp8", "fp16")),
            (("--reference", tmp, "--model", "x.json"), 2, ("--reference", "--model")),
            (("--reference", tmp / "none"), 1, ("none/train.json", "No such file")),
            (("--reference", REFERENCE / "tiny-tied", "--ranks"), 2, ("--ranks",)),
            (("--trace", tmp / "none" / "t.json"), 1, ("cannot write", "t.json"))):
        runs.expect_one_error(cli.qshard("walkthrough", *args, ranks=2), rc, *texts)


# --- the page

class Page(html.parser.HTMLParser):
    """Every element closed where it belongs; texts of elements with an id."""
    VOID = {"meta"}

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.addresses = [], {}, []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [attributes[a] for a in ("src", "href") if a in attributes]
        if tag not in self.VOID:
            self.open.append((tag, attributes.get("id")))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1][1]:
            name = self.open[-1][1]
            self.texts[name] = self.texts.get(name, "") + data


def test_page_is_self_contained_and_holds_the_json(tmp):
    path = runs.model(tmp, vocab_size=61)
    doc = walk("--model", path, "--html", tmp / "step.html", ranks=3)
    text = (tmp / "step.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    page = Page(text)
    assert json.loads(page.texts["data"]) == doc
    assert not page.addresses and "@import" not in text and "url(" not in text
    outside = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
    assert not outside, outside
    doc = walk("--model", path, "--mesh", "2x2", "--html", tmp / "mesh.html", ranks=4)
    assert json.loads(Page((tmp / "mesh.html").read_text()).texts["data"]) == doc
    bad = cli.qshard("walkthrough", "--html", tmp / "no" / "p.html", ranks=2)
    runs.expect_one_error(bad, 1, "cannot write", "no/p.html")


def test_topics(tmp):
    for topic, ranks, texts in (
            ("ring", 4, ("round 3 of 3", "on 4 of 4 ranks", "384 + 384")),
            ("ring", 1, ("on 1 of 1 ranks",)),
            ("rope", 2, ("positions a turn", "✓ a product depends on the distance")),
            ("mesh", 6, ("full", "hybrid", "3x2", "6x1", "none", "✓ all checks of these steps")),
            ("two-by-two", 2, ("rank 1", "reduce-scatter wait", "✓ all checks"))):
        result = cli.qshard("walkthrough", "--topic", topic, ranks=ranks)
        for text in texts:
            cli.expect(result, out=text)
        for line in result.out.splitlines():
            assert columns(line) <= 80, f"{line}\n{result}"
    result = cli.qshard("walkthrough", "--topic", "two-by-two", ranks=3)
    runs.expect_one_error(result, 2, "2 ranks", "mpirun -n 2")
    result = cli.qshard("walkthrough", "--topic", "rope", "--format", "json")
    runs.expect_one_error(result, 2, "--format text")


# --- traces

def read_trace(path, ranks):
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(ranks))
    for rank in range(ranks):
        own = [e for e in events if e["pid"] == rank]
        lanes = {e["args"]["name"]: e["tid"] for e in own if e["name"] == "thread_name"}
        assert set(lanes) == {"compute", "gather", "reduce", "io"}
        spans = [e for e in own if e["ph"] == "X"]
        assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
        assert {lanes["compute"], lanes["gather"], lanes["reduce"]} <= {e["tid"] for e in spans}
        begins, ends = ([e["id2"]["local"] for e in own if e["ph"] == kind] for kind in "be")
        assert begins and begins == ends
    return events


def test_trace_of_a_walkthrough(tmp):
    doc = walk("--model", runs.model(tmp), "--trace", tmp / "t.json", ranks=2)
    events = read_trace(tmp / "t.json", 2)
    moved = doc["communication"]["total"]
    for rank in range(2):
        sent = sum(e["args"].get("logical_bytes", 0) for e in events
                   if e["pid"] == rank and e["ph"] == "X")
        assert sent == moved["gather_logical_bytes"][rank] + moved["reduce_logical_bytes"][rank]


def test_trace_of_a_run(tmp):
    runs.start_files(tmp)
    cli.expect(runs.train(tmp, ranks=2, train__out=tmp / "plain"))
    result = runs.train(tmp, ranks=2, extra=("--trace", tmp / "t.json", "--trace-steps", 3),
                        train__out=tmp / "traced", checkpoint__every=2)
    cli.expect(result, out="t.json")
    plain, traced = (runs.metrics(tmp / name)[0] for name in ("plain", "traced"))
    for a, b in zip(plain, traced):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])
    events = read_trace(tmp / "t.json", 2)
    for rank in range(2):
        names = [e["name"] for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert names.count("read samples") == 3 and names.count("embedding") == 3
        assert names.count("save checkpoint") == 1
    bad = runs.train(tmp, extra=("--trace", tmp / "no" / "t.json"), train__out=tmp / "bad")
    runs.expect_one_error(bad, 1, "cannot write", "no/t.json")


if __name__ == "__main__":
    cli.main()
