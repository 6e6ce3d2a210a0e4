// What followed the ends of a text, where they occurred before: a suffix automaton of the text itself, sorted texts, and the tree that
// grows from both. The twin of outrider/drafters/lookup: suffix.py, corpus.py and mixture.py say what is computed and why. All sums are in
// their order, so trees and masses are the same bits.
#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi.hpp"

namespace outrider {
namespace {

constexpr int64_t WIDEST = 8, CLIMB = 64, REACH = 64, SAMPLE = 64, OWN = 3;  // OWN: ends of the text that are looked for in itself
constexpr int32_t BORDER = 0x7fffffff, FORCED = 64;
constexpr size_t MANY = 16;  // edges of a state that are not searched one by one

struct Edge {
    int32_t token, state;
};

// The edges of a state, in the order in which they came.
struct Edges {
    std::vector<Edge> list;
    std::unique_ptr<std::unordered_map<int32_t, size_t>> places;

    Edges() = default;
    Edges(Edges&&) = default;
    Edges& operator=(Edges&&) = default;
    Edges(const Edges& other) : list(other.list) { index(); }

    void index() {
        if (list.size() <= MANY) return;
        places = std::make_unique<std::unordered_map<int32_t, size_t>>();
        for (size_t i = 0; i < list.size(); i++) places->emplace(list[i].token, i);
    }
    Edge* find(int32_t token) {
        if (places) {
            auto found = places->find(token);
            return found == places->end() ? nullptr : &list[found->second];
        }
        for (Edge& edge : list)
            if (edge.token == token) return &edge;
        return nullptr;
    }
    void add(int32_t token, int32_t state) {
        list.push_back({token, state});
        if (places) places->emplace(token, list.size() - 1);
        else index();
    }
};

struct State {
    int32_t length, link, count;
    Edges next;
};

struct Option {
    int32_t token;
    int64_t count;
    int32_t state;                // of the automaton, or the only place
    std::vector<int32_t> places;  // several places; else empty
};

// Keeps the WIDEST options of the largest counts, the first of equal ones.
void keep(std::vector<Option>& options) {
    std::stable_sort(options.begin(), options.end(), [](const Option& a, const Option& b) { return a.count > b.count; });
    if (options.size() > WIDEST) options.resize(WIDEST);
}

struct Text {  // a source: places of tokens
    const int32_t* tokens;
    int64_t count;
    int32_t end;
};

struct Member {
    int32_t source;  // -1: the automaton
    int32_t state;
    std::vector<int32_t> places;
    double weight;
    int64_t length;

    bool same(int32_t of, const Option& o) const { return source == of && state == o.state && places == o.places; }
};

struct Found {
    int32_t token;
    double mass;
    std::vector<Member> members;
};

struct Open {
    double mass;
    int64_t order;
    int32_t token, parent;
    int64_t level;
    std::vector<Member> members;
};

bool later(const Open& a, const Open& b) { return a.mass < b.mass || (a.mass == b.mass && a.order > b.order); }

// Places of `segment` by the tokens before them, compared with the last `length` tokens before `end`: -1, 0, 1.
int compare(const Segment& segment, int32_t place, const int32_t* end, int64_t length) {
    for (int64_t i = 0; i < length; i++) {
        int64_t at = segment.count - 1 - place - i;
        if (at < 0) return -1;
        if (segment.tokens[at] != end[-1 - i]) return segment.tokens[at] < end[-1 - i] ? -1 : 1;
    }
    return 0;
}

// The first of the sorted places that is not below these tokens; above: that is above them.
int64_t bound(const Segment& segment, const int32_t* end, int64_t length, bool above) {
    int64_t low = 0, high = segment.count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (compare(segment, segment.order[middle], end, length) < (above ? 1 : 0)) low = middle + 1;
        else high = middle;
    }
    return low;
}

int64_t longest(const Segment& segment, const int32_t* end, int64_t length) {
    int64_t at = bound(segment, end, length, false), best = 0;
    for (int64_t i = at > 0 ? at - 1 : 0; i <= at && i < segment.count; i++) {
        int64_t from = segment.count - 1 - segment.order[i], n = 0;
        while (n < length && n <= from && segment.tokens[from - n] == end[-1 - n]) n++;
        best = std::max(best, n);
    }
    return best;
}

class Lookup {
   public:
    Lookup() { states_.push_back({0, -1, 0, {}}); }

    void push(int32_t token) {
        read_.push_back(token);
        int32_t made = static_cast<int32_t>(states_.size()), p = last_;
        states_.push_back({states_[p].length + 1, 0, 0, {}});
        Edge* edge = nullptr;
        for (; p >= 0 && !(edge = states_[p].next.find(token)); p = states_[p].link) states_[p].next.add(token, made);
        if (p >= 0) {
            int32_t q = edge->state;
            if (states_[p].length + 1 == states_[q].length) {
                states_[made].link = q;
            } else {
                int32_t clone = static_cast<int32_t>(states_.size());
                states_.push_back({states_[p].length + 1, states_[q].link, states_[q].count, Edges(states_[q].next)});
                for (; p >= 0 && (edge = states_[p].next.find(token)) && edge->state == q; p = states_[p].link) edge->state = clone;
                states_[q].link = states_[made].link = clone;
            }
        }
        last_ = made;
        for (int64_t i = 0, at = made; i < CLIMB && at > 0; i++, at = states_[at].link) states_[at].count++;
    }

    void offer(LookupJob& job) {
        for (int64_t i = 0; i < job.unread_count; i++) push(job.unread[i]);
        texts_.clear();
        std::vector<Member> members = ends();
        bool wanted = job.nodes > 0;
        for (int64_t c = 0; wanted && c < job.corpora_count; c++) look(job.corpora[c], members);
        if (wanted && job.forced_count) {
            members.push_back({static_cast<int32_t>(texts_.size()), 0, {}, FORCED * FORCED, FORCED});
            texts_.push_back({job.forced, job.forced_count, -1});
        }
        double total = 0;
        job.match = 0, job.made = 1;
        for (const Member& m : members) total += m.weight, job.match = std::max(job.match, m.length);
        job.tokens[0] = read_.back(), job.parents[0] = -1, job.masses[0] = 1;
        if (total == 0 || !wanted || job.depth == 0 || job.width == 0) return;
        heap_.clear(), order_ = 0;
        expand(job, 0, 0, members, 1 / total);
        while (!heap_.empty()) {
            std::pop_heap(heap_.begin(), heap_.end(), later);
            Open best = std::move(heap_.back());
            heap_.pop_back();
            int32_t node = static_cast<int32_t>(job.made++);
            job.tokens[node] = best.token, job.parents[node] = best.parent, job.masses[node] = best.mass;
            if (job.made > job.nodes) break;
            if (best.level < job.depth) expand(job, node, best.level, best.members, 1.0);
        }
    }

   private:
    // The longest end of the text that occurred before in it, and ends at most half as long.
    std::vector<Member> ends() const {
        std::vector<Member> out;
        int64_t most = static_cast<int64_t>(read_.size());
        for (int32_t at = states_[last_].link; at > 0 && static_cast<int64_t>(out.size()) < OWN; at = states_[at].link) {
            int64_t n = states_[at].length;
            if (n > most) continue;
            out.push_back({-1, at, {}, static_cast<double>(n * n), n});
            most = n / 2;
        }
        return out;
    }

    // The longest ends that are in the two best segments, and ends half as long.
    void look(const Segments& corpus, std::vector<Member>& members) {
        const int32_t* end = read_.data() + read_.size();
        int64_t length = std::min(REACH, static_cast<int64_t>(read_.size()));
        std::pair<int64_t, int64_t> best[2] = {{0, -1}, {0, -1}};
        for (int64_t s = 0; s < corpus.count; s++) {
            std::pair<int64_t, int64_t> here{longest(corpus.segments[s], end, length), s};
            if (here > best[0]) best[1] = best[0], best[0] = here;
            else if (here > best[1]) best[1] = here;
        }
        for (auto [n, s] : best) {
            if (!n) continue;
            const Segment& segment = corpus.segments[s];
            int32_t source = static_cast<int32_t>(texts_.size());
            texts_.push_back({segment.tokens, segment.count, BORDER});
            for (; n && n >= best[0].first / 2; n /= 2) {
                int64_t low = bound(segment, end, n, false), high = bound(segment, end, n, true);
                int64_t step = std::max(int64_t(1), (high - low + SAMPLE - 1) / SAMPLE);
                Member m{source, 0, {}, static_cast<double>(n * n), n};
                for (int64_t i = low; i < high; i += step) m.places.push_back(static_cast<int32_t>(segment.count) - segment.order[i]);
                if (m.places.size() == 1) m.state = m.places[0], m.places.clear();
                members.push_back(std::move(m));
            }
        }
    }

    // What followed: the total count, and the options.
    int64_t following(const Member& m, std::vector<Option>& options) {
        options.clear();
        int64_t total = 0;
        if (m.source < 0) {
            for (const Edge& edge : states_[m.state].next.list) {
                int64_t count = states_[edge.state].count;
                total += count;
                options.push_back({edge.token, count, edge.state, {}});
            }
        } else {
            const Text& text = texts_[m.source];
            const int32_t* places = m.places.empty() ? &m.state : m.places.data();
            for (size_t i = 0; i < std::max(m.places.size(), size_t(1)); i++) {
                if (places[i] >= text.count || text.tokens[places[i]] == text.end) continue;
                int32_t token = text.tokens[places[i]], next = places[i] + 1;
                auto same = std::find_if(options.begin(), options.end(), [&](const Option& o) { return o.token == token; });
                total++;
                if (same == options.end()) {
                    options.push_back({token, 1, next, {}});
                    continue;
                }
                if (same->count++ == 1) same->places.push_back(same->state), same->state = 0;
                same->places.push_back(next);
            }
        }
        keep(options);
        return total;
    }

    void expand(const LookupJob& job, int32_t node, int64_t level, const std::vector<Member>& members, double scale) {
        std::vector<Found> found;
        std::vector<Option> options;
        for (const Member& m : members) {
            int64_t n = following(m, options);
            double share = options.empty() ? 0 : scale * m.weight / (static_cast<double>(n) + job.doubt / static_cast<double>(m.length));
            for (Option& o : options) {
                double mass = share * static_cast<double>(o.count);
                auto into = std::find_if(found.begin(), found.end(), [&](const Found& f) { return f.token == o.token; });
                if (into == found.end()) into = found.insert(into, {o.token, 0, {}});
                into->mass += mass;
                auto& held = into->members;
                // contexts that lead to one state are one context from there on
                auto same = std::find_if(held.begin(), held.end(), [&](const Member& h) { return h.same(m.source, o); });
                if (same == held.end()) held.push_back({m.source, o.state, std::move(o.places), mass, m.length + 1});
                else same->weight = mass + same->weight, same->length = std::max(m.length + 1, same->length);
            }
        }
        std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.mass > b.mass; });
        for (size_t i = 0; i < found.size() && static_cast<int64_t>(i) < job.width; i++) {
            if (!(found[i].mass >= job.least)) continue;
            heap_.push_back({found[i].mass, ++order_, found[i].token, node, level + 1, std::move(found[i].members)});
            std::push_heap(heap_.begin(), heap_.end(), later);
        }
    }

    std::vector<State> states_;
    std::vector<int32_t> read_;
    int32_t last_ = 0;
    std::vector<Text> texts_;
    std::vector<Open> heap_;
    int64_t order_ = 0;
};

}  // namespace

OUTRIDER_API void* outrider_lookup_new() { return new Lookup(); }
OUTRIDER_API void outrider_lookup_free(void* lookup) { delete static_cast<Lookup*>(lookup); }
OUTRIDER_API void outrider_lookup(void* lookup, LookupJob* job) { static_cast<Lookup*>(lookup)->offer(*job); }

}  // namespace outrider
