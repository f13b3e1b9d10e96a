"""The logits of a small Qwen3 in double precision, written from its definition and from nothing of ours."""
import array
import json
import math
import struct


def read_weights(folder):
    """Name → (shape, values) of the f32 tensors in model.safetensors."""
    data = (folder / "model.safetensors").read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    weights = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "F32", (name, entry)
        begin, end = entry["data_offsets"]
        values = array.array("f", data[8 + size + begin:8 + size + end])
        rows, cols = (entry["shape"] + [None])[:2]
        weights[name] = ([values[r * cols:(r + 1) * cols].tolist() for r in range(rows)] if cols
                         else values.tolist())
    return weights


def product(matrix, x):
    return [math.fsum(w * v for w, v in zip(row, x)) for row in matrix]


def rms_norm(x, weight, eps):
    scale = 1 / math.sqrt(math.fsum(v * v for v in x) / len(x) + eps)
    return [v * scale * w for v, w in zip(x, weight)]


def rotate(x, position, theta):
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        c, s = math.cos(angle), math.sin(angle)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


def heads(x, size):
    return [x[i:i + size] for i in range(0, len(x), size)]


class Qwen3:
    def __init__(self, folder):
        self.c = json.loads((folder / "config.json").read_text())
        self.w = read_weights(folder)

    def attention(self, x, layer):
        c, size, eps = self.c, self.c["head_dim"], self.c["rms_norm_eps"]
        theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
        w = {p: self.w[f"{layer}.self_attn.{p}.weight"]
             for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}

        def rotated(kind):
            return [[rotate(rms_norm(h, w[f"{kind}_norm"], eps), t, theta)
                     for h in heads(product(w[f"{kind}_proj"], row), size)]
                    for t, row in enumerate(x)]
        q, k = rotated("q"), rotated("k")
        v = [heads(product(w["v_proj"], row), size) for row in x]
        group = len(q[0]) // len(k[0])
        out = []
        for t in range(len(x)):
            row = []
            for h, query in enumerate(q[t]):
                scores = [math.fsum(a * b for a, b in zip(query, k[s][h // group])) / math.sqrt(size)
                          for s in range(t + 1)]
                highest = max(scores)
                p = [math.exp(s - highest) for s in scores]
                total = math.fsum(p)
                row += [math.fsum(p[s] * v[s][h // group][d] for s in range(t + 1)) / total
                        for d in range(size)]
            out.append(product(w["o_proj"], row))
        return out

    def logits(self, ids):
        """Of the token after the last one."""
        eps = self.c["rms_norm_eps"]
        embedding = self.w["model.embed_tokens.weight"]
        x = [list(embedding[i]) for i in ids]
        for layer in (f"model.layers.{i}" for i in range(self.c["num_hidden_layers"])):
            norm = self.w[f"{layer}.input_layernorm.weight"]
            for row, delta in zip(x, self.attention([rms_norm(r, norm, eps) for r in x], layer)):
                row[:] = [a + b for a, b in zip(row, delta)]
            for row in x:
                normed = rms_norm(row, self.w[f"{layer}.post_attention_layernorm.weight"], eps)
                gate, up = (product(self.w[f"{layer}.mlp.{p}_proj.weight"], normed)
                            for p in ("gate", "up"))
                act = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)]
                delta = product(self.w[f"{layer}.mlp.down_proj.weight"], act)
                row[:] = [a + b for a, b in zip(row, delta)]
        head = embedding if self.c["tie_word_embeddings"] else self.w["lm_head.weight"]
        return product(head, rms_norm(x[-1], self.w["model.norm.weight"], eps))
