// SPDX-License-Identifier: Apache-2.0
// Which part of an update a projection takes off, and what that came to: of the channel interventions (dissociation), and of a
// trainer that makes them itself.
#pragma once

namespace faultline {

/// Which part of an update D of W = U S V^T counts as lying along the leading k directions (U, V: k columns each).
enum class Sides : unsigned char {
    both,    ///< U U^T D V V^T: what couples the leading directions with each other ("two-sided")
    either,  ///< D - (I - U U^T) D (I - V V^T): what touches one of them ("one-sided on both sides")
    left,    ///< U U^T D
    right,   ///< D V V^T
};

/// Squared Frobenius norms of one update and of what was done to it.
struct RemovedEnergy {
    double update = 0;   ///< of the update as it came
    double leading = 0;  ///< of its part along the leading directions
    double removed = 0;  ///< |D|^2 - |D'|^2: negative where energy was added
    double changed = 0;  ///< |D - D'|^2
    double missing = 0;  ///< elsewhere: what the complement did not have
    void join(const RemovedEnergy& next);
    /// removed / update; 0 for no update.
    [[nodiscard]] double fraction() const { return update > 0 ? removed / update : 0; }
};

inline void RemovedEnergy::join(const RemovedEnergy& next) {
    update += next.update;
    leading += next.leading;
    removed += next.removed;
    changed += next.changed;
    missing += next.missing;
}

}  // namespace faultline
