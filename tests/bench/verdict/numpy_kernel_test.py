# SPDX-License-Identifier: Apache-2.0
"""bench/verdict: the numpy kernel is attention (binary64, the gradients by finite differences), rounds as its formats do, and its
fault is found. With the environment variable FAULTLINE_PROGRAM, in the repository's root. 77: numpy is missing."""
import os
import sys
import tempfile
import unittest

try:
    import numpy as np
except ImportError:
    print("SKIPPED: no numpy")
    sys.exit(77)

sys.path.insert(0, "bench/verdict")
import check_rates  # noqa: E402
from numpy_kernel import head, inputs, layer, to_bf16, truncated  # noqa: E402


def attention(q, k, v):
    """o and lse in binary64."""
    s = np.where(np.tri(len(q), dtype=bool), q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v, np.log(p.sum(1)) + s.max(1)


class Kernel(unittest.TestCase):
    def test_is_attention(self):
        exact = lambda x: np.asarray(x, np.float32)  # noqa: E731
        q, k, v, do = inputs(np.random.default_rng(1), "normal", 12, 8, to_bf16)
        got = head(q, k, v, do, exact, block=5)
        wide = [x.astype(np.float64) for x in (q, k, v)]
        o, lse = attention(*wide)
        np.testing.assert_allclose(got["o"], o, atol=1e-5)
        np.testing.assert_allclose(got["lse"], lse, atol=1e-5)
        step = 1e-6
        for which, name in enumerate(("dq", "dk", "dv")):
            for at in ((0, 0), (5, 3), (11, 7)):
                up, down = [x.copy() for x in wide], [x.copy() for x in wide]
                up[which][at] += step
                down[which][at] -= step
                slope = ((attention(*up)[0] - attention(*down)[0]) * do).sum() / (2 * step)
                self.assertAlmostEqual(float(got[name][at]), slope, delta=1e-4, msg=f"{name}{at}")

    def test_rounds(self):
        # Between 1 and 1 + 2^-7 in bf16: the middle is a tie and goes to the even 1, what is above it up.
        np.testing.assert_array_equal(to_bf16([1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8]), [1, 1 + 2**-7, 1 + 2**-6])
        np.testing.assert_array_equal(truncated(np.float32([1.99, -1.99, 0]), 2), [1.5, -1.5, 0])

    def test_a_fault_is_found_and_none_is_not(self):
        calls = check_rates.Calls(os.environ["FAULTLINE_PROGRAM"])
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "head.safetensors")
            for fault, expected in ((None, []), ("dk", ["layer0.dk wrong"])):
                layer(path, 3, n=32, d=16, count=1, fault=fault, size=0.125)
                found = check_rates.told(calls.check(path, "--plan", "fa2", "--runs", "16", "--outputs", "o,dk"))
                self.assertEqual(found, expected, fault)


if __name__ == "__main__":
    unittest.main()
