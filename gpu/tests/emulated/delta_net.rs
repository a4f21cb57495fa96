//! The gated delta net: inputs, recurrence, replay of accepted rows, commit.

use std::ops::Range;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::delta_net::{
    Committed, HeadOrder, Layer, Projected, Shape, Weights, commit, delta_rule, inputs,
};
use foretoken_gpu::plan::segments::{Place, Recurrent, Segment, Segments};
use foretoken_kernels::Isa;
use foretoken_kernels::delta_net::{HeadRows, advance, convolve, l2_normalize, scratch_len};

use super::cases::{Case, Numbers, close, same, same_bits};
use super::device::Device;

const ISA: Isa = Isa::Scalar;
const SOURCES: &[&str] = &["delta_net.cpp"];
const LAYERS: usize = 2;

/// A memory word that was not written.
const POISON: f32 = f32::from_bits(0xcdcd_cdcd);

/// The weights of all layers.
struct Net {
    shape: Shape,
    layers: Vec<LayerWeights>,
}

struct LayerWeights {
    conv: Vec<f32>,    // (taps, channels)
    dt_bias: Vec<f32>, // (heads)
    rate: Vec<f32>,    // (heads)
}

/// Results of the projections of a sequence's rows, of one layer.
#[derive(Clone, Default)]
struct Rows {
    qkv: Vec<f32>, // (rows, channels)
    a: Vec<f32>,   // (rows, heads)
    b: Vec<f32>,   // (rows, heads)
}

/// The state of a layer, and the last rows' inputs and outputs, on the CPU.
#[derive(Clone)]
struct State {
    matrices: Vec<f32>,
    window: Vec<f32>,
    x: Vec<f32>, // (rows, row length), without padding
    y: Vec<f32>, // (rows, heads, value_dim)
}

/// A sequence on the device, and its rows.
struct Sequence {
    rows: Vec<Rows>, // of each layer
    matrices: DeviceSlice<f32>,
    window: DeviceSlice<f32>,
    logs: [DeviceSlice<f32>; 2], // of the last round, of this round
    accepted: DeviceSlice<u32>,
}

/// Some rows of a sequence in a pass.
struct Part<'a> {
    sequence: &'a Sequence,
    rows: Range<usize>,
    whole: Option<DeviceSlice<f32>>,
    skipped: usize,
}

/// The results of a pass.
struct Passed {
    segments: Segments,
    inputs: Vec<Vec<f32>>, // of each layer: (rows, row length)
    y: Vec<Vec<f32>>,      // of each layer: (rows, heads, value_dim)
}

impl Rows {
    fn new(shape: &Shape, count: usize, numbers: &mut Numbers) -> Self {
        let mut gates = || numbers.normals(count * shape.value_heads).iter().map(|x| 3.0 * x).collect();
        let (a, b) = (gates(), gates());
        Self { qkv: numbers.normals(count * shape.channels()), a, b }
    }

    fn of(&self, shape: &Shape, rows: Range<usize>) -> Self {
        let part = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
        let heads = shape.value_heads;
        Self { qkv: part(&self.qkv, shape.channels()), a: part(&self.a, heads), b: part(&self.b, heads) }
    }

    fn extend(&mut self, other: &Self) {
        self.qkv.extend(&other.qkv);
        self.a.extend(&other.a);
        self.b.extend(&other.b);
    }
}

impl Net {
    fn new(shape: Shape, numbers: &mut Numbers) -> Self {
        let mut layer = || LayerWeights {
            conv: numbers.normals(shape.taps * shape.channels()),
            dt_bias: numbers.normals(shape.value_heads),
            rate: numbers.normals(shape.value_heads).iter().map(|x| -(2.0 * x).exp()).collect(),
        };
        Self { shape, layers: (0..LAYERS).map(|_| layer()).collect() }
    }

    /// Advances a state by rows.
    fn advance(&self, layer: usize, state: &mut State, rows: &Rows) {
        let (shape, weights) = (&self.shape, &self.layers[layer]);
        let (channels, heads, key_dim, value_dim) =
            (shape.channels(), shape.value_heads, shape.key_dim, shape.value_dim);
        let (keys, count) = (shape.key_heads * key_dim, rows.a.len() / heads);
        let all = [&state.window[..], &rows.qkv].concat();
        let mut x = vec![0.0; count * channels];
        convolve(ISA, &all.chunks_exact(channels).collect::<Vec<_>>(), &weights.conv, channels, &mut x);
        for x in x.chunks_exact_mut(channels) {
            l2_normalize(&mut x[..keys], key_dim, (key_dim as f32).powf(-0.5));
            l2_normalize(&mut x[keys..2 * keys], key_dim, 1.0);
        }
        state.window = all[count * channels..].to_vec();
        let decay = |head: usize, a: f32| {
            let x = f64::from(a) + f64::from(weights.dt_bias[head]);
            (f64::from(weights.rate[head]) * (x.max(0.0) + (-x.abs()).exp().ln_1p())).exp() as f32
        };
        let beta = |b: f32| (1.0 / (1.0 + (-f64::from(b)).exp())) as f32;
        state.y = vec![0.0; count * heads * value_dim];
        let mut gates = vec![0.0; count * 2 * heads];
        for (head, matrix) in state.matrices.chunks_exact_mut(key_dim * value_dim).enumerate() {
            let of_head = |x: &[f32]| x.iter().skip(head).step_by(heads).copied().collect::<Vec<_>>();
            let decays: Vec<f32> = of_head(&rows.a).into_iter().map(|a| decay(head, a)).collect();
            let betas: Vec<f32> = of_head(&rows.b).into_iter().map(beta).collect();
            let query = key_dim
                * match shape.order {
                    HeadOrder::Grouped => head / (heads / shape.key_heads),
                    HeadOrder::Tiled => head % shape.key_heads,
                };
            let value = 2 * keys + head * value_dim;
            let of =
                HeadRows { x: &x, stride: channels, query, key: keys + query, value, decay: &decays, beta: &betas };
            let mut y = vec![0.0; count * value_dim];
            advance(ISA, matrix, key_dim, of, &mut vec![0.0; scratch_len(key_dim)], &mut y);
            for row in 0..count {
                let at = (row * heads + head) * value_dim;
                state.y[at..at + value_dim].copy_from_slice(&y[row * value_dim..][..value_dim]);
                gates[row * 2 * heads + head] = decays[row];
                gates[(row * 2 + 1) * heads + head] = betas[row];
            }
        }
        let rows = x.chunks_exact(channels).zip(gates.chunks_exact(2 * heads));
        state.x = rows.flat_map(|(x, gates)| [x, gates].concat()).collect();
    }

    /// A sequence of `count` rows whose state is random, and that state.
    fn sequence(&self, device: &mut dyn Device, count: usize, numbers: &mut Numbers) -> (Sequence, Vec<State>) {
        let shape = &self.shape;
        let rows = self.layers.iter().map(|_| Rows::new(shape, count, numbers)).collect();
        let state = |numbers: &mut Numbers| State {
            matrices: numbers.normals(shape.matrices_len()),
            window: numbers.normals(shape.window_len()),
            x: Vec::new(),
            y: Vec::new(),
        };
        let states: Vec<State> = self.layers.iter().map(|_| state(numbers)).collect();
        (self.sequence_of(device, rows, &states), states)
    }

    fn sequence_of(&self, device: &mut dyn Device, rows: Vec<Rows>, states: &[State]) -> Sequence {
        let (matrices, window): (Vec<_>, Vec<_>) =
            states.iter().map(|state| (state.matrices.clone(), state.window.clone())).unzip();
        let log = LAYERS * self.shape.log_len();
        Sequence {
            rows,
            matrices: device.of(&matrices.concat()),
            window: device.of(&window.concat()),
            logs: [device.poisoned(log), device.poisoned(log)],
            accepted: device.of(&[0]),
        }
    }

    /// Runs all layers over the parts' rows.
    fn pass(&self, device: &mut dyn Device, parts: &[Part<'_>]) -> Result<Passed, String> {
        let shape = self.shape;
        let (mut segments, mut places, mut first) = (Vec::new(), Vec::<Place>::new(), 0);
        for (index, part) in parts.iter().enumerate() {
            let sequence = part.sequence;
            let recurrent = Recurrent {
                matrices: sequence.matrices.address(),
                window: sequence.window.address(),
                replayed: sequence.logs[0].address(),
                log: sequence.logs[1].address(),
                whole: part.whole.map_or(0, DeviceSlice::address),
                accepted: sequence.accepted.address(),
            };
            segments.push(Segment {
                recurrent: device.of(&[recurrent]).address(),
                first,
                rows: part.rows.len() as i32,
                ..Segment::default()
            });
            places.extend(vec![[-1, -1, index as i32, 0]; part.rows.len()]);
            first += part.rows.len() as i32;
        }
        // As for acceptance, after rows without outputs were dropped.
        let dropped = segments.iter().zip(parts).map(|(segment, part)| segment.kept(part.skipped, 1000));
        let dropped: Vec<Segment> = dropped.collect();
        let list = |slice| Segments { slice, count: parts.len(), longest: 0 };
        let (all, dropped, places_of) = (list(device.of(&segments)), list(device.of(&dropped)), device.of(&places));
        let (mut outputs, mut inputs_of) = (Vec::new(), Vec::new());
        for (index, weights) in self.layers.iter().enumerate() {
            let mut from = Rows::default();
            parts.iter().for_each(|part| from.extend(&part.sequence.rows[index].of(&shape, part.rows.clone())));
            let (qkv, a, b) = (device.of(&from.qkv), device.of(&from.a), device.of(&from.b));
            let weights = Weights {
                conv: device.of(&weights.conv),
                dt_bias: device.of(&weights.dt_bias),
                rate: device.of(&weights.rate),
            };
            let rows = places.len();
            let memory = parts.iter().any(|part| part.whole.is_some());
            let memory = memory.then(|| device.poisoned(rows * shape.row_len()));
            let layer = Layer { shape, index, layers: LAYERS, segments: all, rows, inputs: memory };
            let y = device.poisoned(rows * shape.value_heads * shape.value_dim);
            if rows > 0 {
                device.run(inputs(&layer, places_of, &weights, &Projected { qkv, a, b }))?;
            }
            device.run(delta_rule(&layer, y))?;
            outputs.push(device.read(y));
            inputs_of.push(memory.map_or(Vec::new(), |memory| device.read(memory)));
        }
        Ok(Passed { segments: dropped, inputs: inputs_of, y: outputs })
    }

    fn commit(&self, device: &mut dyn Device, segments: &Segments, committed: Committed) -> Result<(), String> {
        device.run(commit(&self.shape, LAYERS, segments, &committed))
    }

    /// Applies the accepted rows: returns the matrices.
    fn settled(&self, device: &mut dyn Device, sequence: &Sequence) -> Result<Vec<f32>, String> {
        let passed = self.pass(device, &[part(sequence, 0..0)])?;
        self.commit(device, &passed.segments, Committed::Rows { segment: 0, rows: 0 })?;
        same("accepted rows", &device.read(sequence.accepted), &[0])?;
        Ok(device.read(sequence.matrices))
    }

    /// Compares rows of inputs: values and gates, then queries and keys.
    fn same_inputs(&self, what: &str, got: &[f32], want: &[f32]) -> Result<(), String> {
        let (shape, keys) = (&self.shape, 2 * self.shape.key_heads * self.shape.key_dim);
        let channels = shape.channels();
        let rows = got.chunks_exact(shape.row_len()).zip(want.chunks_exact(channels + 2 * shape.value_heads));
        for (got, want) in rows {
            same_bits(&format!("values of {what}"), &got[keys..channels], &want[keys..channels])?;
            close(&format!("queries and keys of {what}"), &got[..keys], &want[..keys], 1e-6)?;
            close(&format!("gates of {what}"), &got[channels..want.len()], &want[channels..], 1e-6)?;
            let padding = &got[want.len()..];
            same_bits(&format!("padding of {what}"), padding, &vec![POISON; padding.len()])?;
        }
        Ok(())
    }
}

impl Sequence {
    /// The next round.
    fn exchange_logs(&mut self) {
        self.logs.swap(0, 1);
    }
}

fn part(sequence: &Sequence, rows: Range<usize>) -> Part<'_> {
    Part { sequence, rows, whole: None, skipped: 0 }
}

/// Two sequences: one has a round of logged rows with accepted ones before it, the other a prompt.
struct Rounds {
    net: Net,
    sequences: [Sequence; 2],
    states: [Vec<State>; 2],
    before: usize,
    rows: usize,
    prompt: usize,
}

/// What the second round wrote.
struct Written {
    passed: Passed,
    logs: [Vec<f32>; 2],
    matrices: [Vec<f32>; 2], // of the prompt, those after it
    windows: [Vec<f32>; 2],
}

impl Rounds {
    fn new(device: &mut dyn Device, shape: Shape, [before, rows, prompt]: [usize; 3]) -> Self {
        let mut numbers = Numbers::new((prompt + shape.key_dim) as u64);
        let net = Net::new(shape, &mut numbers);
        let (first, first_states) = net.sequence(device, before + rows + 1, &mut numbers);
        let (second, second_states) = net.sequence(device, 1 + prompt, &mut numbers);
        Self { net, sequences: [first, second], states: [first_states, second_states], before, rows, prompt }
    }

    /// Advances the CPU's states of a layer.
    fn advance(&mut self, sequence: usize, layer: usize, rows: Range<usize>) {
        let of = self.sequences[sequence].rows[layer].of(&self.net.shape, rows);
        self.net.advance(layer, &mut self.states[sequence][layer], &of);
    }

    /// A pass, committed by results that accept `rows` of the first sequence and all of the second.
    fn round(&self, device: &mut dyn Device, parts: &[Part<'_>], rows: usize) -> Result<Passed, String> {
        let passed = self.net.pass(device, parts)?;
        let results = device.of(&[rows as u32 - 1, 7000, 0, 8000]);
        self.net.commit(device, &passed.segments, Committed::Accepted(results))?;
        same("accepted rows", &device.read(self.sequences[0].accepted), &[rows as u32])?;
        Ok(passed)
    }

    /// Both sequences log; the first one row too many.
    fn log_both(&mut self, device: &mut dyn Device) -> Result<(), String> {
        let [first, second] = &self.sequences;
        let passed = self.round(device, &[part(first, 0..self.before + 1), part(second, 0..1)], self.before)?;
        for layer in 0..LAYERS {
            let before = self.states[0][layer].clone();
            self.advance(0, layer, 0..self.before + 1);
            self.advance(1, layer, 0..1);
            let y = [&self.states[0][layer].y[..], &self.states[1][layer].y].concat();
            close("outputs of the first round", &passed.y[layer], &y, 1e-5)?;
            self.states[0][layer] = before;
            self.advance(0, layer, 0..self.before);
        }
        self.sequences.iter_mut().for_each(Sequence::exchange_logs);
        Ok(())
    }

    /// Accepted rows before a logged round and before a prompt, whose matrices are written to other memory.
    fn log_and_prompt(&self, device: &mut dyn Device) -> Result<Written, String> {
        let ([first, second], end) = (&self.sequences, self.before + self.rows);
        let whole = device.poisoned(second.matrices.len());
        let prompt = Part { whole: Some(whole), skipped: self.prompt - 1, ..part(second, 1..1 + self.prompt) };
        let unchanged = device.read(second.matrices);
        let passed = self.round(device, &[part(first, self.before..end), prompt], self.rows)?;
        same("accepted rows of a prompt", &device.read(second.accepted), &[0])?;
        same_bits("matrices before the prompt", &device.read(second.matrices), &unchanged)?;
        Ok(Written {
            passed,
            logs: [device.read(first.logs[1]), device.read(second.logs[1])],
            matrices: [device.read(first.matrices), device.read(whole)],
            windows: [device.read(first.window), device.read(second.window)],
        })
    }

    /// Compares a layer of the second round.
    fn compare(&mut self, layer: usize, written: &Written) -> Result<(), String> {
        let (shape, end) = (self.net.shape, self.before + self.rows);
        let of_layer = |x: &[f32], len: usize| x[layer * len..(layer + 1) * len].to_vec();
        let [matrices, whole] = written.matrices.each_ref().map(|all| of_layer(all, shape.matrices_len()));
        close("replayed matrices", &matrices, &self.states[0][layer].matrices, 1e-5)?;
        self.advance(0, layer, self.before..end);
        self.advance(1, layer, 1..1 + self.prompt);
        let [state, prompt] = [0, 1].map(|sequence| &self.states[sequence][layer]);
        close("outputs", &written.passed.y[layer], &[&state.y[..], &prompt.y].concat(), 1e-5)?;
        close("matrices of a prompt", &whole, &prompt.matrices, 1e-5)?;
        for (window, state) in written.windows.iter().zip([state, prompt]) {
            same_bits("the window", &of_layer(window, shape.window_len()), &state.window)?;
        }
        let row = shape.row_len();
        let [log, prompt_log] = written.logs.each_ref().map(|all| of_layer(all, shape.log_len()));
        let rows_of = |log: &[f32], at: Range<usize>| -> Vec<f32> {
            log.chunks_exact(row + shape.channels()).flat_map(|row| &row[at.clone()]).copied().collect()
        };
        let logged = rows_of(&log, 0..row);
        self.net.same_inputs("the log", &logged[..self.rows * row], &state.x)?;
        self.net.same_inputs("the prompt", &written.passed.inputs[layer][self.rows * row..], &prompt.x)?;
        // A log has the last rows of a prompt, before the convolution only.
        let last = self.prompt.min(shape.log_rows);
        let parts = [(&log, 0, self.before..end), (&prompt_log, 1, 1 + self.prompt - last..1 + self.prompt)];
        for (log, sequence, rows) in parts {
            let want = self.sequences[sequence].rows[layer].of(&shape, rows).qkv;
            let got = rows_of(log, row..row + shape.channels());
            same_bits("logged rows before the convolution", &got[..want.len()], &want)?;
            same_bits("the rest of the log", &got[want.len()..], &vec![POISON; got.len() - want.len()])?;
        }
        let inputs = rows_of(&prompt_log, 0..row);
        same_bits("inputs of a prompt in the log", &inputs, &vec![POISON; inputs.len()])
    }
}

fn round_case(shape: Shape, [before, rows, prompt]: [usize; 3]) -> Case {
    let name = format!("delta net {shape:?}: {before} accepted rows, {rows}, a prompt of {prompt}");
    Case::new(name, SOURCES, move |device| {
        let mut rounds = Rounds::new(device, shape, [before, rows, prompt]);
        rounds.log_both(device)?;
        let written = rounds.log_and_prompt(device)?;
        (0..LAYERS).try_for_each(|layer| rounds.compare(layer, &written))?;
        // Another round, whose rows are dropped: the matrices have the accepted ones.
        let first = &mut rounds.sequences[0];
        first.exchange_logs();
        rounds.net.pass(device, &[part(first, before + rows..before + rows + 1)])?;
        let want: Vec<f32> = rounds.states[0].iter().flat_map(|state| &state.matrices).copied().collect();
        close("matrices", &device.read(first.matrices), &want, 1e-5)
    })
}

/// After rounds of which any number of rows is accepted, matrices, windows and outputs have the bits of single steps,
/// whatever else is in the pass; and so have those after a prompt.
fn rollback_case(shape: Shape, rows: usize) -> Case {
    let name = format!("delta net {shape:?}: {rows} rows have the bits of single steps");
    Case::new(name, SOURCES, move |device| {
        let mut numbers = Numbers::new(rows as u64);
        let net = Net::new(shape, &mut numbers);
        let total = rows + 2;
        let (mut single, states) = net.sequence(device, total, &mut numbers);
        let (other, _) = net.sequence(device, shape.log_rows, &mut numbers);
        let width = shape.value_heads * shape.value_dim;

        // States after every number of rows, and the rows' outputs.
        let (mut matrices, mut windows) = (vec![device.read(single.matrices)], vec![device.read(single.window)]);
        let mut y = vec![Vec::new(); LAYERS];
        for row in 0..total {
            let passed = net.pass(device, &[part(&single, row..row + 1)])?;
            net.commit(device, &passed.segments, Committed::Rows { segment: 0, rows: 1 })?;
            single.exchange_logs();
            y.iter_mut().zip(&passed.y).for_each(|(y, row)| y.extend(row));
            windows.push(device.read(single.window));
            matrices.push(net.settled(device, &single)?);
        }
        let outputs = |what: &str, got: &Passed, rows: Range<usize>| {
            got.y.iter().zip(&y).try_for_each(|(got, want)| {
                same_bits(what, &got[got.len() - rows.len() * width..], &want[rows.start * width..rows.end * width])
            })
        };

        for accepted in 0..=rows {
            let mut sequence = net.sequence_of(device, single.rows.clone(), &states);
            let passed = net.pass(device, &[part(&other, 0..3), part(&sequence, 0..rows)])?;
            outputs("outputs of a round", &passed, 0..rows)?;
            net.commit(device, &passed.segments, Committed::Rows { segment: 1, rows: accepted })?;
            same("rows of the other", &device.read(other.accepted), &[0])?;
            same_bits("the window", &device.read(sequence.window), &windows[accepted])?;
            sequence.exchange_logs();
            // Replayed before two rows, of which one is accepted.
            let passed = net.pass(device, &[part(&sequence, accepted..accepted + 2)])?;
            outputs("outputs after a round", &passed, accepted..accepted + 2)?;
            same_bits("the replayed matrices", &device.read(sequence.matrices), &matrices[accepted])?;
            let results = device.of(&[0, 9000]);
            net.commit(device, &passed.segments, Committed::Accepted(results))?;
            sequence.exchange_logs();
            same_bits("the matrices", &net.settled(device, &sequence)?, &matrices[accepted + 1])?;
            same_bits("the last window", &device.read(sequence.window), &windows[accepted + 1])?;
        }
        // As a prompt, in place.
        let sequence = net.sequence_of(device, single.rows.clone(), &states);
        let whole = Some(sequence.matrices);
        let passed = net.pass(device, &[Part { whole, ..part(&sequence, 0..total) }])?;
        net.commit(device, &passed.segments, Committed::Rows { segment: 0, rows: total })?;
        outputs("outputs of a prompt", &passed, 0..total)?;
        same_bits("the matrices after a prompt", &device.read(sequence.matrices), &matrices[total])?;
        same_bits("the window after a prompt", &device.read(sequence.window), &windows[total])
    })
}

fn shape([key_heads, value_heads]: [usize; 2], [key_dim, value_dim]: [usize; 2], order: HeadOrder) -> Shape {
    Shape { key_heads, value_heads, key_dim, value_dim, order, taps: 4, log_rows: 5 }
}

pub fn all() -> Vec<Case> {
    let published = Shape { log_rows: 16, ..shape([2, 4], [128, 128], HeadOrder::Grouped) };
    let many = shape([3, 36], [8, 4], HeadOrder::Tiled);
    let mut cases = vec![round_case(published, [3, 16, 20]), rollback_case(published, 4)];
    cases.extend([round_case(many, [4, 2, 3]), rollback_case(Shape { taps: 2, ..many }, 2)]);
    cases.push(round_case(Shape { taps: 2, ..many }, [1, 1, 1]));
    cases.push(rollback_case(shape([1, 2], [72, 72], HeadOrder::Grouped), 5));
    cases
}

pub fn small() -> Vec<Case> {
    let grouped = shape([2, 4], [40, 36], HeadOrder::Grouped);
    vec![
        round_case(grouped, [2, 3, 18]),
        round_case(shape([2, 4], [12, 8], HeadOrder::Tiled), [1, 5, 2]),
        rollback_case(shape([1, 2], [8, 8], HeadOrder::Grouped), 3),
    ]
}
