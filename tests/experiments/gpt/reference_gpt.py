# SPDX-License-Identifier: Apache-2.0
"""An independent GPT-2 in JAX, float64, whose gradients come from automatic differentiation. Reads a file that
jax_test.cpp wrote (weights, tokens, what C++ got) and fails where the two differ by more than the file allows."""
import json
import struct
import sys

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
except ImportError:
    sys.exit("no jax")

jax.config.update("jax_enable_x64", True)


def read(path):
    raw = open(path, "rb").read()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    types = {"F64": np.float64, "F32": np.float32, "I32": np.int32}
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(raw[8 + size + begin : 8 + size + end], types[entry["dtype"]]).reshape(entry["shape"])
    return tensors, header["__metadata__"]


tensors, meta = read(sys.argv[1])
layers, heads = int(meta["layers"]), int(meta["heads"])
qk_norm, gate, sigma = meta["qk_norm"], meta["output_gate"] == "1", meta["sigma_reparam"] == "1"
softcap, z_loss, epsilon = float(meta["softcap"]), float(meta["z_loss"]), float(meta["epsilon"])


def matrix(w, name):
    if not sigma or name in ("wte", "wpe"):
        return w[name]
    return w[name + ".gamma"][0, 0] * w[name] / jnp.linalg.norm(w[name], 2)


def norm(w, name, x):
    centred = x - x.mean(-1, keepdims=True)
    y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * w[name + ".gain"][0]
    return y + w[name + ".bias"][0] if name + ".bias" in w else y


def rms(x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def attention(w, l, x):
    batch, length, width = x.shape
    d = width // heads
    bias = jnp.split(w[f"layer{l}.b_in"][0], 4 if gate else 3) if f"layer{l}.b_in" in w else [0.0] * 4
    part = lambda i, name: x @ matrix(w, f"layer{l}.{name}") + bias[i]
    split = lambda y: y.reshape(batch, length, heads, d).transpose(0, 2, 1, 3)
    q, k, v = (split(part(i, n)) for i, n in enumerate(("w_q", "w_k", "w_v")))
    if qk_norm != "0":
        q, k = rms(q), rms(k)
    if qk_norm == "2":
        q, k = q * w[f"layer{l}.q_gain"][0], k * w[f"layer{l}.k_gain"][0]
    s = jnp.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(d)
    if softcap > 0:
        s = softcap * jnp.tanh(s / softcap)
    s = jnp.where(np.tril(np.ones((length, length), bool)), s, -jnp.inf)
    o = jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(s, -1), v).transpose(0, 2, 1, 3).reshape(x.shape)
    if gate:
        o = o * jax.nn.sigmoid(part(3, "w_gate"))
    return o @ matrix(w, f"layer{l}.w_o") + (w[f"layer{l}.b_o"][0] if f"layer{l}.b_o" in w else 0.0)


def losses(w, tokens, targets):
    x = w["wte"][tokens] + w["wpe"][: tokens.shape[1]]
    for l in range(layers):
        x = x + attention(w, l, norm(w, f"layer{l}.norm1", x))
        h = norm(w, f"layer{l}.norm2", x) @ matrix(w, f"layer{l}.w_fc")
        h = jax.nn.gelu(h + (w[f"layer{l}.b_fc"][0] if f"layer{l}.b_fc" in w else 0.0), approximate=True)
        x = x + h @ matrix(w, f"layer{l}.w_proj") + (w[f"layer{l}.b_proj"][0] if f"layer{l}.b_proj" in w else 0.0)
    logits = norm(w, "final_norm", x) @ w["wte"].T
    lse = jax.scipy.special.logsumexp(logits, -1)
    cross = (lse - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean()
    return cross + z_loss * (lse**2).mean(), cross


weights = {n[2:]: jnp.asarray(t) for n, t in tensors.items() if n.startswith("w:")}
step = jax.jit(jax.value_and_grad(losses, has_aux=True))
tokens, targets = tensors["tokens"], tensors["targets"]
(_, cross), gradient = step(weights, tokens[0], targets[0])
assert abs(cross - tensors["losses"][0]) <= float(meta["gradient_tolerance"]) * abs(cross), (cross, tensors["losses"][0])
for name, value in gradient.items():
    mine = tensors["g:" + name]
    error = float(jnp.linalg.norm(value - mine) / jnp.linalg.norm(value))
    assert error <= float(meta["gradient_tolerance"]), f"{name}: relative difference {error}"

# AdamW (0.9, 0.95), clip 1, without decay; in numpy, whose calls cost less than JAX's outside of jit.
weights = {n: np.asarray(v) for n, v in weights.items()}
first = {n: np.zeros_like(v) for n, v in weights.items()}
second = dict(first)
for t, loss in enumerate(tensors["losses"]):
    (_, cross), gradient = step(weights, tokens[t], targets[t])
    assert abs(cross - loss) <= float(meta["loss_tolerance"]), f"step {t}: loss {loss}, JAX {cross}"
    gradient = {n: np.asarray(g) for n, g in gradient.items()}
    total = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    factor = 1 / (total + 1e-6) if total > 1 else 1.0
    for n in weights:
        g = gradient[n] * factor
        first[n] = 0.9 * first[n] + 0.1 * g
        second[n] = 0.95 * second[n] + 0.05 * g**2
        mean, square = first[n] / (1 - 0.9 ** (t + 1)), second[n] / (1 - 0.95 ** (t + 1))
        weights[n] = weights[n] - float(meta["rate"]) * mean / (np.sqrt(square) + float(meta["adam_epsilon"]))
