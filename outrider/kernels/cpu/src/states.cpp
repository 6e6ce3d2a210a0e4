#include "states.hpp"

#include <cstdlib>
#include <cstring>

#include "pool.hpp"
#include "program.hpp"

OUTRIDER_API void outrider_advise_huge(void* memory, int64_t bytes);

namespace outrider {
namespace {

constexpr int64_t MOST_TAPS = 8;
// Memory of records that a slot's next step may take over, though it needs less.
constexpr int64_t SMALL_RECORDS = 1 << 22;

void copy(float* to, const float* from, int64_t floats) { std::memcpy(to, from, static_cast<size_t>(floats) * 4); }

}  // namespace

SlotStates::SlotStates(const Op* ops, int64_t count, int64_t slots, int64_t kept)
    : slots_(static_cast<size_t>(slots)), zeros_(nullptr, std::free), kept_(kept) {
    for (const Op* op = ops; op < ops + count; op++) {
        if (op->kind != OP_CONV && op->kind != OP_SCAN) continue;
        bool conv = op->kind == OP_CONV;
        auto number = static_cast<size_t>(op->i[0]);
        if (number >= parts_.size()) parts_.resize(number + 1);
        int64_t rows = conv ? op->i[1] - 1 : 0;
        int64_t size = conv ? rows * op->in.width : int64_t(op->i[2]) * op->i[3] * op->i[4];
        parts_[number] = {op, size_, record_, rows};
        size_ += (size + 15) / 16 * 16, record_ += op->in.width + op->other.width;
        reach_ = rows > reach_ ? rows : reach_;
        if (!conv && size > largest_) largest_ = size;
    }
    zeros_.reset(static_cast<float*>(std::calloc(static_cast<size_t>(size_), sizeof(float))));
}

int32_t SlotStates::take() {
    if (free_.empty()) {
        blocks_.emplace_back(new float[static_cast<size_t>(size_)]);
        outrider_advise_huge(blocks_.back().get(), size_ * 4);
        return static_cast<int32_t>(blocks_.size() - 1);
    }
    int32_t block = free_.back();
    free_.pop_back();
    return block;
}

void SlotStates::give(int32_t& block) {
    if (block != NONE) free_.push_back(block);
    block = NONE;
}

// Forget the nodes from this one on.
void SlotStates::retire(std::vector<Node>& nodes, size_t from) {
    for (size_t n = from; n < nodes.size(); n++) give(nodes[n].block);
    nodes.resize(from);
}

// Memory for records. That of earlier steps is used again, unless nodes still point to it.
std::shared_ptr<float[]> SlotStates::room(int64_t floats) {
    std::shared_ptr<float[]> found;
    std::vector<Records> used;
    for (Records& each : records_) {
        bool unused = each.memory.use_count() == 1;
        if (unused && !found && each.size >= floats && each.size <= SMALL_RECORDS + 2 * floats) found = each.memory, unused = false;
        if (!unused) used.push_back(std::move(each));
    }
    records_.swap(used);
    if (found) return found;
    found.reset(new float[static_cast<size_t>(floats)]);
    records_.push_back({found, floats});
    return found;
}

int64_t SlotStates::begin(const ForwardJob& job, const Plan& plan) {
    const int64_t all = job.held + job.nodes, count = plan.segment[job.batch];
    auto parent_of = [&](int64_t b, int64_t n) { return static_cast<int32_t>(job.parents ? job.parents[b * all + n] : n - 1); };
    for (int64_t b = 0; b < job.batch; b++) {
        const std::vector<Node>& nodes = slots_[static_cast<size_t>(job.rows[b])].nodes;
        if (static_cast<int64_t>(nodes.size()) < job.held) return -1 - b;
        for (int64_t n = job.held; n < all; n++) {
            int32_t parent = parent_of(b, n);
            if (parent >= 0 && parent < job.held && !nodes[static_cast<size_t>(parent)].record) return -1 - b;
        }
    }
    free_.insert(free_.end(), retired_.begin(), retired_.end());
    retired_.clear(), chains_.clear();
    passing_ = 0;
    record_of_.assign(static_cast<size_t>(count), nullptr);
    past_.resize(static_cast<size_t>(count * reach_));
    for (int64_t b = 0; b < job.batch; b++) retire(slots_[static_cast<size_t>(job.rows[b])].nodes, static_cast<size_t>(job.held));
    std::shared_ptr<float[]> memory = room(count * record_);
    for (int64_t b = 0, row = 0; b < job.batch; b++) {
        Slot& slot = slots_[static_cast<size_t>(job.rows[b])];
        for (int64_t n = job.held; n < all; n++) {
            int32_t parent = parent_of(b, n);
            if (parent == PADDING) {
                slot.nodes.push_back({PADDING, NONE, nullptr, nullptr});
                continue;
            }
            float* record = record_of_[static_cast<size_t>(row)] = memory.get() + row * record_;
            slot.nodes.push_back({parent, NONE, record, memory});
            int32_t beyond = 0, at = parent;
            for (int64_t back = 0; back < reach_; back++) {
                if (at < 0) beyond++;
                past_[static_cast<size_t>(row * reach_ + back)] = {
                    at < 0 ? memory_of(slot.committed) : slot.nodes[static_cast<size_t>(at)].record, beyond};
                if (at >= 0) at = slot.nodes[static_cast<size_t>(at)].parent;
            }
            row++;
        }
        cut(slot, job.held, plan.segment[b]);
    }
    work_.resize(static_cast<size_t>(passing_ * largest_));
    return 0;
}

// Cut the nodes of a slot from `held` on into chains. row: of the first.
void SlotStates::cut(Slot& slot, int64_t held, int32_t row) {
    std::vector<Node>& nodes = slot.nodes;
    struct Mark {  // of a node
        int32_t chain = NONE, index = 0, wave = NONE;
        bool last = false;  // of its chain, until now
        int32_t passing = NONE;
    };
    std::vector<Mark> marks(nodes.size());
    size_t own = chains_.size();
    auto pass = [&] { return PADDING - static_cast<int32_t>(passing_++); };
    // What a chain begins with that goes on from this node.
    auto after = [&](int32_t node) {
        if (node == NONE) return slot.committed;
        if (int32_t block = nodes[static_cast<size_t>(node)].block; block != NONE) return block;
        Mark& mark = marks[static_cast<size_t>(node)];
        if (mark.passing != NONE) return mark.passing;
        mark.passing = pass();
        if (node >= held) return chains_[static_cast<size_t>(mark.chain)].places[static_cast<size_t>(mark.index)] = mark.passing;
        Chain again{};
        again.end = mark.passing, mark.wave = 0;
        std::vector<int32_t> path;
        int32_t at = node;
        for (; at != NONE && nodes[static_cast<size_t>(at)].block == NONE; at = nodes[static_cast<size_t>(at)].parent) path.push_back(at);
        again.start = at == NONE ? slot.committed : nodes[static_cast<size_t>(at)].block;
        for (size_t i = path.size(); i-- > 0;) again.records.push_back(nodes[static_cast<size_t>(path[i])].record);
        again.rows.assign(path.size(), NONE), again.places.assign(path.size(), NONE);
        chains_.push_back(std::move(again));
        return mark.passing;
    };
    for (size_t n = static_cast<size_t>(held); n < nodes.size(); n++) {
        int32_t parent = nodes[n].parent;
        if (parent == PADDING) continue;
        Mark& mark = marks[n];
        if (parent >= held && marks[static_cast<size_t>(parent)].last) {
            Mark& above = marks[static_cast<size_t>(parent)];
            above.last = false;
            mark.chain = above.chain, mark.wave = above.wave;
        } else {
            int32_t start = after(parent);  // may add a chain
            mark.wave = parent == NONE ? 0 : marks[static_cast<size_t>(parent)].wave + 1;
            mark.chain = static_cast<int32_t>(chains_.size());
            chains_.push_back({start, NONE, mark.wave, {}, {}, {}});
        }
        Chain& chain = chains_[static_cast<size_t>(mark.chain)];
        mark.index = static_cast<int32_t>(chain.rows.size()), mark.last = true;
        chain.records.push_back(nodes[n].record), chain.rows.push_back(row++), chain.places.push_back(NONE);
    }
    // The states after the last `kept_` nodes that have or end a chain. Those before serve this forward only.
    int64_t left = kept_;
    for (size_t n = nodes.size(); n-- > 0;) {
        if (marks[n].last) {
            if (left > 0) nodes[n].block = take();
            chains_[static_cast<size_t>(marks[n].chain)].end = left > 0 ? nodes[n].block : pass();
            left--;
        } else if (nodes[n].block != NONE && left-- <= 0) {
            retired_.push_back(nodes[n].block);
            nodes[n].block = NONE;
        }
    }
    for (size_t i = own; i < chains_.size(); i++)
        for (int32_t& place : chains_[i].places)
            if (place == NONE) place = chains_[i].end;
}

void SlotStates::convolve(Context& c, const Op& op) {
    const Part& part = parts_[static_cast<size_t>(op.i[0])];
    const int64_t width = op.in.width, taps = op.i[1];
    over_nodes(c, static_cast<double>(width) / 8e3,
               [&](int64_t n) { copy(record_of_[static_cast<size_t>(n)] + part.record, c.row(op.in, n), width); });
    over_nodes(c, static_cast<double>(width * taps) / 8e3, [&](int64_t n) {
        const float* inputs[MOST_TAPS];
        inputs[taps - 1] = record_of_[static_cast<size_t>(n)] + part.record;
        for (int64_t back = 0; back < taps - 1; back++) {
            const Past& past = past_[static_cast<size_t>(n * reach_ + back)];
            inputs[taps - 2 - back] = past.base + (past.beyond ? part.state + (part.rows - past.beyond) * width : part.record);
        }
        kernels()->convolve(inputs, op.p, op.q, c.row(op.out, n), width, taps, op.i[2] == SILU);
    });
}

void SlotStates::scan(Context& c, const Op& op) {
    const Part& part = parts_[static_cast<size_t>(op.i[0])];
    const int64_t width = op.in.width, more = op.other.width;
    over_nodes(c, static_cast<double>(width + more) / 8e3, [&](int64_t n) {
        float* record = record_of_[static_cast<size_t>(n)] + part.record;
        copy(record, c.row(op.in, n), width);
        if (more) copy(record + width, c.row(op.other, n), more);
    });
    std::vector<const Chain*> group;
    for (int32_t wave = 0;; wave++) {
        group.clear();
        for (const Chain& chain : chains_)
            if (chain.wave == wave) group.push_back(&chain);
        if (group.empty()) return;
        run(part, group, &c);
    }
}

// Move states on along chains of one wave. c: where the outputs go; null: nowhere.
void SlotStates::run(const Part& part, const std::vector<const Chain*>& chains, const Context* c) {
    const Op& op = *part.op;
    auto address = [&](int32_t place) { return place >= NONE ? memory_of(place) + part.state : work_.data() + (PADDING - place) * largest_; };
    std::vector<const float*> records, starts;
    std::vector<float*> out, states;
    std::vector<int64_t> ends{0};
    for (const Chain* chain : chains) {
        starts.push_back(address(chain->start));
        for (size_t i = 0; i < chain->rows.size(); i++) {
            records.push_back(chain->records[i] + part.record);
            out.push_back(c && chain->rows[i] != NONE ? c->row(op.out, chain->rows[i]) : nullptr);
            states.push_back(address(chain->places[i]));
        }
        ends.push_back(static_cast<int64_t>(records.size()));
    }
    ScanJob job{};
    job.records = records.data(), job.out = out.data(), job.states = states.data(), job.starts = starts.data();
    job.chains = ends.data(), job.count = static_cast<int64_t>(chains.size());
    job.kind = op.i[1], job.heads = op.i[2], job.keys = op.i[3], job.width = op.i[4], job.groups = op.i[5], job.per_column = op.i[6];
    job.a = op.p, job.through = op.q, job.factor = op.f[0];
    if (job.kind == DELTA_RULE) {
        job.key = job.groups * job.keys, job.value = 2 * job.key, job.step = job.value + job.heads * job.width;
        job.decay = job.step + job.heads;
    } else {
        job.key = job.heads * job.keys, job.query = job.key + job.groups * job.width, job.step = job.query + job.groups * job.width;
    }
    run_scan(job);
}

int64_t SlotStates::commit(int64_t number, const int64_t* path, int64_t count) {
    Slot& slot = slots_[static_cast<size_t>(number)];
    std::vector<Node>& nodes = slot.nodes;
    auto node = [&](int64_t i) -> Node& { return nodes[static_cast<size_t>(path[i])]; };
    if (count < 1) return 0;
    for (int64_t i = 0; i < count; i++)
        if (path[i] < 0 || path[i] >= static_cast<int64_t>(nodes.size()) || !node(i).record) return -1 - i;
    for (int64_t i = 0; i < count; i++)
        if (node(i).parent != (i ? path[i - 1] : NONE)) return 1;
    free_.insert(free_.end(), retired_.begin(), retired_.end());
    retired_.clear();
    int32_t block = node(count - 1).block;
    if (block == NONE) {
        block = take();
        int64_t first = count - 1;
        while (first > 0 && node(first - 1).block == NONE) first--;
        Chain chain{first ? node(first - 1).block : slot.committed, block, 0, {}, {}, {}};
        for (int64_t i = first; i < count; i++) chain.records.push_back(node(i).record);
        chain.rows.assign(chain.records.size(), NONE), chain.places.assign(chain.records.size(), block);
        Hot hot;
        for (const Part& part : parts_)
            if (part.op && part.op->kind == OP_SCAN) run(part, {&chain}, nullptr);
    }
    node(count - 1).block = NONE;
    for (const Part& part : parts_)
        for (int64_t back = 1; back <= part.rows; back++) {
            const int64_t width = part.op->in.width, before = count - back;
            const float* from = before >= 0 ? node(before).record + part.record
                                            : memory_of(slot.committed) + part.state + (part.rows + before) * width;
            copy(memory_of(block) + part.state + (part.rows - back) * width, from, width);
        }
    give(slot.committed);
    slot.committed = block;
    // Node i is now node i - count, as in the cache's cells. What followed the path goes on from the committed state. Nodes beside the
    // path can have no children any more.
    std::vector<int32_t> below(nodes.size(), PADDING);
    below[static_cast<size_t>(path[count - 1])] = NONE;
    std::vector<Node> rest;
    bool any = false;
    for (size_t n = 0; n < nodes.size(); n++) {
        Node& old = nodes[n];
        int32_t parent = old.parent < 0 ? PADDING : below[static_cast<size_t>(old.parent)];
        if (parent == PADDING) give(old.block);
        else if (static_cast<int64_t>(n) >= count) below[n] = static_cast<int32_t>(n - static_cast<size_t>(count));
        if (static_cast<int64_t>(n) < count) continue;
        if (parent == PADDING) old = {PADDING, NONE, nullptr, nullptr};
        else any = true, old.parent = parent;
        rest.push_back(std::move(old));
    }
    if (!any) rest.clear();
    nodes.swap(rest);
    return 0;
}

void SlotStates::reset(int64_t number) {
    Slot& slot = slots_[static_cast<size_t>(number)];
    retire(slot.nodes, 0);
    give(slot.committed);
}

void SlotStates::read(int64_t number, float* to) const { copy(to, memory_of(slots_[static_cast<size_t>(number)].committed), size_); }

void SlotStates::write(int64_t number, const float* from) {
    reset(number);
    int32_t block = slots_[static_cast<size_t>(number)].committed = take();
    copy(memory_of(block), from, size_);
}

void run_conv(Context& c, const Op& op) { c.states->convolve(c, op); }
void run_scan(Context& c, const Op& op) { c.states->scan(c, op); }

OUTRIDER_API void* outrider_states_new(const Op* ops, int64_t count, int64_t slots, int64_t kept) {
    return new SlotStates(ops, count, slots, kept);
}
OUTRIDER_API void outrider_states_free(void* states) { delete static_cast<SlotStates*>(states); }
OUTRIDER_API int64_t outrider_states_commit(void* states, int64_t slot, const int64_t* path, int64_t count) {
    return static_cast<SlotStates*>(states)->commit(slot, path, count);
}
OUTRIDER_API void outrider_states_reset(void* states, int64_t slot) { static_cast<SlotStates*>(states)->reset(slot); }
OUTRIDER_API void outrider_states_read(const void* states, int64_t slot, float* to) {
    static_cast<const SlotStates*>(states)->read(slot, to);
}
OUTRIDER_API void outrider_states_write(void* states, int64_t slot, const float* from) {
    static_cast<SlotStates*>(states)->write(slot, from);
}
OUTRIDER_API int64_t outrider_states_size(const void* states) { return static_cast<const SlotStates*>(states)->size(); }
OUTRIDER_API int64_t outrider_states_made(const void* states) { return static_cast<const SlotStates*>(states)->made(); }

}  // namespace outrider
