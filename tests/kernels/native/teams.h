// Teams that grow and shrink from phase to phase: every chunk is done once, and by a member of the
// team that the phase was begun with, as it has memory for no other.
#pragma once

namespace teams {

struct Tally : Phase {
    int64_t count;
    int members;
    mutable std::vector<std::atomic<int>> times;
    mutable std::atomic<int> strangers{0};

    Tally(int64_t count, int members) : count(count), members(members), times(count) {}
    int64_t num_chunks() const override { return count; }
    void run(int64_t chunk, int member, bool) const override {
        times[chunk]++;
        strangers += member >= members;
    }
};

bool are_right() {
    constexpr int64_t BEYOND = (1 << 20) + 3;  // more chunks than a ticket counts
    int wrong = 0, strangers = 0;
    for (int round = 0; round <= 20000; round++) {
        const Tally large(64, 16), small(round == 20000 ? BEYOND : 64, 2);
        Turn turn(large.members);
        turn.team.run(large);
        turn.team.begin(small.members);  // at once, while members of the large team look for more
        turn.team.run(small);
        for (const Tally* tally : {&large, &small}) {
            strangers += tally->strangers;
            for (const std::atomic<int>& times : tally->times) wrong += times != 1;
        }
    }
    printf("teams that grow and shrink: %d chunks not done once, %d done by strangers\n", wrong,
           strangers);
    return wrong == 0 && strangers == 0;
}

}  // namespace teams
