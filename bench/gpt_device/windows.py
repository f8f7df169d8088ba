#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The windows of text that `faultline train` takes, for another trainer that is to see the same ones in the same order.

A window's offset is floor(u (tokens - length)), u the i-th number of the stream (seed, step) (experiments/gpt/window_order.cpp;
lib/random/random_stream.hpp); the numbers are Philox4x32-10's of Salmon, Moraes, Dror, Shaw, SC'11.
"""
WORD = 0xFFFFFFFF
ABSORBING = 0x61627362  # the third counter word where a stream's name is taken in
VALIDATION = 0x76616C  # is added to a run's seed for the windows of its validation


def philox4x32(counter, key):
    """Four words of 32 bits of a counter of four and a key of 64 bits."""
    key0, key1 = key & WORD, key >> 32
    for _ in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (product1 >> 32 ^ counter[1] ^ key0, product1 & WORD, product0 >> 32 ^ counter[3] ^ key1, product0 & WORD)
        key0, key1 = key0 + 0x9E3779B9 & WORD, key1 + 0xBB67AE85 & WORD
    return counter


def stream_key(*name):
    key = 0
    for position, number in enumerate(name):
        block = philox4x32((number & WORD, number >> 32 & WORD, ABSORBING, position), key)
        key = block[1] << 32 | block[0]
    return key


def uniform(key, i):
    """The i-th number of a stream, in [0, 1)."""
    block = philox4x32((i >> 1 & WORD, i >> 33, 0, 0), key)
    low, high = block[i % 2 * 2:i % 2 * 2 + 2]
    return ((high << 32 | low) >> 11) * 2.0**-53


def training_windows(seed, step, windows, tokens, length):
    """Offsets of a step's windows of `length` tokens and the one after them, in a text of `tokens`."""
    key = stream_key(seed, step)
    return [int(uniform(key, i) * float(tokens - length)) for i in range(windows)]


def validation_windows(seed, batch, windows, tokens, length):
    """The same of a batch of the validation, whose text has `tokens`."""
    return training_windows(seed + VALIDATION, batch, windows, tokens, length)
