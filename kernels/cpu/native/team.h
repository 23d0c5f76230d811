// A team of threads: one leads, the others follow if they are there in time.
//
// A step is a list of phases, a phase a number of chunks. Each member has a share of the chunks;
// it takes those first (its caches know them), then what is left of the others'. Nobody waits for a
// member that is not there: a member that is kept off its core by another process takes nothing,
// and the leader does its share. The leader waits only for chunks that somebody has begun, and not
// for one that is lent: that it does again itself, and the member finds its own results not wanted.
//
// A follower keeps off the leader's core: on a busy machine Linux wakes it where the leader runs, and
// then leaves both there.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

constexpr int MOST_MEMBERS = 64;
constexpr int SPINS = 4000;  // about 50 us: longer than between two phases, shorter than noticed
constexpr int PATIENCE = 500;  // spins of the leader before it takes a chunk that is lent

INLINE void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A member's hold on the chunk that it is at. One taken off its core while its chunk is lent keeps
// nobody waiting: the leader takes the chunk, and the phase may be over before the member is back.
class Hold {
  public:
    // From now on the chunk may be taken, until `keep`. Till then its member writes nothing that
    // others read, and reads of the phase itself nothing: only what outlives it (`Team::recall`). What
    // it reads may be overwritten meanwhile: then its results are not wanted any more.
    void lend() { state_.store(LENT, std::memory_order_release); }

    // Whether the chunk is still this member's, and stays it: now it may write its results.
    bool keep() {
        int seen = LENT;
        return state_.compare_exchange_strong(seen, HELD, std::memory_order_acq_rel);
    }

  private:
    friend class Team;
    enum State : int { HELD, LENT, TAKEN };

    bool take() {
        int seen = LENT;
        return state_.load(std::memory_order_relaxed) == LENT &&
               state_.compare_exchange_strong(seen, TAKEN, std::memory_order_acq_rel);
    }

    alignas(64) std::atomic<int> state_{HELD};
    int64_t chunk_ = 0;
    bool is_last_of_share_ = false;
};

struct Phase {
    virtual int64_t num_chunks() const = 0;
    virtual void run(int64_t chunk, int member, bool is_last_of_share, Hold& hold) const = 0;
};

class Team {
  public:
    // Run `phase` to its end. Call `begin` once before a step's phases; one step at a time.
    void begin(int members) {
        members = members < 1 ? 1 : members > MOST_MEMBERS ? MOST_MEMBERS : members;
        for (; hired_ < members - 1 && getpid() == owner_; hired_++)
            if (!hire(hired_ + 1)) break;
        members_.store(members);
    }

    int members() const { return members_.load(std::memory_order_relaxed); }

    void run(const Phase& phase) {
        leader_cpu_.store(this_cpu(), std::memory_order_relaxed);
        const int64_t count = phase.num_chunks();
        if (count == 0) return;
        const int members = members_.load();
        if (count == 1 || members == 1 || count > (int64_t)MASK) {
            Hold alone;
            for (int64_t chunk = 0; chunk < count; chunk++)
                phase.run(chunk, 0, chunk + 1 == count, alone);
            return;
        }
        phase_ = &phase;
        sequence_ = (sequence_ + 1) & 0xffffff;
        target_ += count;
        for (int member = 0; member < members; member++)
            tickets_[member].word.store(
                ticket(sequence_, count * member / members, count * (member + 1) / members));
        if (sleepers_.load() > 0 && getpid() == owner_) {
            std::lock_guard<std::mutex> lock(bed_);
            bell_.notify_all();
        }
        work(0);
        for (int spins = 0; done_.load(std::memory_order_acquire) != target_;)
            if (++spins >= PATIENCE && take_lent(phase))
                spins = 0;
            else if (spins < SPINS)
                pause_briefly();
            else
                sched_yield();  // a follower was taken off its core: it may want this one
    }

    // Wait for members whose chunks were taken: what these read may go after this.
    void recall() const {
        for (int member = 1; member < members(); member++)
            while (holds_[member].state_.load(std::memory_order_acquire) == Hold::TAKEN) sched_yield();
    }

    // Chunks that the leader took.
    int64_t num_taken() const { return num_taken_; }

    std::mutex busy;  // held during a step

  private:
    static constexpr int BITS = 20;  // of a chunk number; 24 bits count phases
    static constexpr uint64_t MASK = (1u << BITS) - 1;

    struct alignas(64) Ticket {
        std::atomic<uint64_t> word{0};
    };

    static uint64_t ticket(uint64_t sequence, uint64_t next, uint64_t end) {
        return sequence << 2 * BITS | next << BITS | end;
    }

    // Take and run chunks while there are any; true if there was one.
    bool work(int member) {
        bool did = false;
        const int members = members_.load(std::memory_order_relaxed);
        for (int turn = 0; turn < members; turn++) {
            const int owner = member + turn < members ? member + turn : member + turn - members;
            std::atomic<uint64_t>& word = tickets_[owner].word;
            uint64_t seen = word.load(std::memory_order_acquire);
            while ((seen >> BITS & MASK) < (seen & MASK)) {
                // One that was kept off its core since a larger team was at work: phases have memory
                // for the members of theirs only.
                if (member >= members_.load(std::memory_order_relaxed)) return did;
                if (!word.compare_exchange_weak(seen, seen + (1ull << BITS))) continue;
                // The phase cannot end before this chunk has: `phase_` is the chunk's own.
                Hold& hold = holds_[member];
                hold.chunk_ = seen >> BITS & MASK;
                hold.is_last_of_share_ = hold.chunk_ + 1 == (int64_t)(seen & MASK);
                phase_->run(hold.chunk_, member, hold.is_last_of_share_, hold);
                if (hold.state_.load(std::memory_order_relaxed) != Hold::TAKEN)
                    done_.fetch_add(1, std::memory_order_release);
                else
                    hold.state_.store(Hold::HELD, std::memory_order_release);
                did = true;
                seen = word.load(std::memory_order_acquire);
            }
        }
        return did;
    }

    // Do a chunk that a follower has not come back to; false if there is none.
    bool take_lent(const Phase& phase) {
        for (int member = 1; member < members(); member++) {
            Hold& hold = holds_[member];
            if (!hold.take()) continue;
            phase.run(hold.chunk_, 0, hold.is_last_of_share_, holds_[0]);
            done_.fetch_add(1, std::memory_order_release);
            num_taken_++;
            return true;
        }
        return false;
    }

    bool has_work() const {
        for (int owner = 0; owner < members_.load(); owner++) {
            const uint64_t seen = tickets_[owner].word.load();
            if ((seen >> BITS & MASK) < (seen & MASK)) return true;
        }
        return false;
    }

    static int this_cpu() {
#if defined(__linux__)
        return sched_getcpu();
#else
        return -1;
#endif
    }

    // Go to the core that is `member` places after the leader's, if there are as many cores.
    void keep_off(int leader_cpu, int member) const {
#if defined(__linux__)
        int cpus[CPU_SETSIZE], count = 0, leader = -1;
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &allowed_)) {
                if (cpu == leader_cpu) leader = count;
                cpus[count++] = cpu;
            }
        if (leader < 0 || members_.load() > count) return;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpus[(leader + member) % count], &one);
        sched_setaffinity(0, sizeof one, &one);  // may be refused: then Linux knows better
#endif
    }

    void follow(int member) {
        for (int spins = 0, seen_cpu = -1;;) {
            const int leader_cpu = leader_cpu_.load(std::memory_order_relaxed);
            if (leader_cpu != seen_cpu) keep_off(seen_cpu = leader_cpu, member);
            if (member < members_.load(std::memory_order_relaxed) && work(member)) {
                spins = 0;
            } else if (++spins < SPINS) {
                pause_briefly();
            } else {
                amx::release();
                std::unique_lock<std::mutex> lock(bed_);
                sleepers_.fetch_add(1);
                while (member >= members_.load() || !has_work()) bell_.wait(lock);
                sleepers_.fetch_sub(1);
                spins = 0;
            }
        }
    }

    bool hire(int member) {  // a thread that no signal reaches; it ends with the process
        struct Contract {
            Team* team;
            int member;
        };
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_t thread;
        auto life = [](void* told) -> void* {
            Contract contract = *(Contract*)told;
            delete (Contract*)told;
            contract.team->follow(contract.member);
            return nullptr;
        };
        auto* contract = new Contract{this, member};
        const bool started = pthread_create(&thread, nullptr, life, contract) == 0;
        if (started)
            pthread_detach(thread);
        else
            delete contract;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }

    Ticket tickets_[MOST_MEMBERS];
    Hold holds_[MOST_MEMBERS];
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> members_{1};
    std::atomic<int> sleepers_{0};
    std::atomic<int> leader_cpu_{-1};
#if defined(__linux__)
    const cpu_set_t allowed_ = [] {
        cpu_set_t set;
        CPU_ZERO(&set);
        sched_getaffinity(0, sizeof set, &set);
        return set;
    }();
#endif
    const Phase* phase_ = nullptr;
    uint64_t sequence_ = 0;
    int64_t target_ = 0, num_taken_ = 0;
    int hired_ = 0;
    const pid_t owner_ = getpid();
    std::mutex bed_;
    std::condition_variable bell_;
};
