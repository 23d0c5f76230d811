// Teams that grow and shrink from phase to phase, and members that are kept off their cores: every
// chunk is done once, and by a member of the team that the phase was begun with, as it has memory
// for no other.
#pragma once

namespace teams {

struct Tally : Phase {
    int64_t count;
    int members;
    mutable std::vector<std::atomic<int>> times;
    mutable std::atomic<int> strangers{0};

    Tally(int64_t count, int members) : count(count), members(members), times(count) {}
    int64_t num_chunks() const override { return count; }
    void run(int64_t chunk, int member, bool, Hold&) const override {
        times[chunk]++;
        strangers += member >= members;
    }
};

// Followers come back to their chunks when the phase is over, which waits for one to have begun.
struct Deserted : Phase {
    mutable std::vector<std::atomic<int>> times;
    mutable std::atomic<int> begun{0}, late{0};
    mutable std::atomic<bool> is_over{false};

    explicit Deserted(int64_t count) : times(count) {}
    int64_t num_chunks() const override { return (int64_t)times.size(); }
    void run(int64_t chunk, int member, bool, Hold& hold) const override {
        hold.lend();
        begun += member > 0;
        while (member == 0 ? begun == 0 : !is_over) sched_yield();
        if (hold.keep())
            times[chunk]++;
        else
            late++;
    }
};

// Some members are away for a while between a chunk's beginning and its end.
struct Restless : Phase {
    int64_t count;
    mutable std::vector<std::atomic<int>> times;

    explicit Restless(int64_t count) : count(count), times(count) {}
    int64_t num_chunks() const override { return count; }
    void run(int64_t chunk, int member, bool, Hold& hold) const override {
        hold.lend();
        if (member > 0 && chunk % 3 == 0) usleep((useconds_t)(chunk % 5 * 20));
        if (hold.keep()) times[chunk]++;
    }
};

int not_once(const std::vector<std::atomic<int>>& times) {
    int wrong = 0;
    for (const std::atomic<int>& one : times) wrong += one != 1;
    return wrong;
}

bool go_on_alone() {
    int wrong = 0, late = 0;
    int64_t taken = 0;
    for (int round = 0; round < 300; round++) {
        Deserted deserted(8);
        {
            Turn turn(4);
            const int64_t before = turn.team.num_taken();
            turn.team.run(deserted);
            taken += turn.team.num_taken() - before;
            deserted.is_over = true;
        }
        wrong += not_once(deserted.times);
        late += deserted.late;
        Restless restless(40);
        {
            Turn turn(4);
            turn.team.run(restless);
        }
        wrong += not_once(restless.times);
    }
    printf("deserted chunks: %ld done by the leader, %d given up, %d not done once\n", (long)taken,
           late, wrong);
    return wrong == 0 && taken >= 300 && late == taken;
}

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
            wrong += not_once(tally->times);
        }
    }
    printf("teams that grow and shrink: %d chunks not done once, %d done by strangers\n", wrong,
           strangers);
    return wrong == 0 && strangers == 0;
}

}  // namespace teams
