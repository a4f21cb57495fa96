//! Speed of the CUDA kernels on this device: products by type, shape and rows, attention by format, depth and rows.
//!
//! ```text
//! cargo run --release -p foretoken-gpu --features cuda --example cuda_speed
//! ```
//!
//! A line per measurement: microseconds per launch in a replayed graph, gigabytes of weights or K/V per second, and
//! 10^12 operations per second. Weights
//! alternate over more memory than the L2 cache.

#[cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]
fn main() {
    if let Err(error) = measure::all() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

#[cfg(not(any(feature = "cuda", feature = "cuda-prebuilt")))]
fn main() {
    eprintln!("built without the feature `cuda`: add --features cuda");
}

#[cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]
mod measure {
    use std::error::Error;
    use std::time::Instant;

    use foretoken_gpu::cuda::{Buffer, CudaError, Device, Recorder, Stream};
    use foretoken_gpu::plan::attention::{
        ExactKv, QuantizedKv, Queries, SplitPartials, Zones, combine, exact, quantized,
    };
    use foretoken_gpu::plan::delta_net::{
        HeadOrder, Layer, MAX_KEY_DIM, Projected, Shape, Weights, delta_rule, inputs,
    };
    use foretoken_gpu::plan::matmul::{Activations, Matrix, matmul, quantize};
    use foretoken_gpu::plan::matmul_float::{self, FloatMatrix};
    use foretoken_gpu::plan::pages::{Pages, exact_page_bytes};
    use foretoken_gpu::plan::rows::{Domain, Order};
    use foretoken_gpu::plan::segments::{Recurrent, Segment, Segments};
    use foretoken_gpu::{Launch, Params};
    use foretoken_kernels::ElementType;
    use foretoken_kernels::attention::turboquant::{CodeFormat, PAGE_TOKENS, PageLayout, RotationGroups, Side};
    use foretoken_kernels::quant::WeightType;

    type Result<T> = std::result::Result<T, Box<dyn Error>>;

    /// Launches per graph, and number of replays.
    const LAUNCHES: usize = 16;
    const REPLAYS: usize = 20;

    pub fn all() -> Result<()> {
        let device = Device::open(0)?;
        let stream = device.stream()?;
        println!("{:?}", device.info());
        for (weight_type, outputs, inputs) in [
            (WeightType::Q8_0, 10240, 2560),
            (WeightType::Q8_0, 2560, 10240),
            (WeightType::Q4_K, 10240, 2560),
            (WeightType::Q4_K, 2560, 10240),
            (WeightType::Q4_0, 10240, 2560),
            (WeightType::Q5_K, 10240, 2560),
            (WeightType::Q6_K, 10240, 2560),
            (WeightType::Q6_K, 262_144, 2560),
            (WeightType::Q4_K, 43_008, 5376),
            (WeightType::Q4_K, 5376, 21_504),
            (WeightType::Q6_K, 5376, 21_504),
            (WeightType::Q4_K, 1536, 6144),
        ] {
            for rows in [1, 2, 4, 8, 16] {
                product(&device, &stream, weight_type, (rows, outputs, inputs))?;
            }
        }
        for (outputs, inputs) in [(10240, 2560), (2560, 10240)] {
            for rows in [1, 4, 8, 16, 64, 512] {
                float_product(&device, &stream, (rows, outputs, inputs))?;
            }
        }
        for weight_type in [WeightType::Q4_K, WeightType::Q6_K, WeightType::Q8_0] {
            for rows in [64, 512] {
                product(&device, &stream, weight_type, (rows, 10240, 2560))?;
            }
        }
        for depth in [8 << 10, 32 << 10, 128 << 10] {
            for rows in [1, 4, 16] {
                attention(&device, &stream, &FULL, None, (rows, depth))?;
                for formats in [(CodeFormat::Tqc5, CodeFormat::Tqc4), (CodeFormat::Turbo3, CodeFormat::Turbo3)] {
                    attention(&device, &stream, &FULL, Some(formats), (rows, depth))?;
                }
            }
        }
        for layer in [&WINDOW_12B, &FULL_12B] {
            for rows in [1, 4, 8, 16, 32, 64, 256] {
                attention(&device, &stream, layer, None, (rows, 4096))?;
            }
        }
        for (heads, accepted, rows) in [(32, 0, 1), (48, 0, 1), (48, 2, 4), (48, 8, 8)] {
            delta_net(&device, &stream, heads, (accepted, rows))?;
        }
        Ok(())
    }

    /// Microseconds per launch of `launch(i)`.
    fn time(
        stream: &Stream,
        launch: impl Fn(&mut Recorder, usize) -> std::result::Result<(), CudaError>,
    ) -> Result<f64> {
        let graph = stream.record(|recorder| (0..LAUNCHES).try_for_each(|i| launch(recorder, i)))?;
        let mut best = f64::INFINITY;
        for _ in 0..REPLAYS {
            stream.synchronize()?;
            let start = Instant::now();
            // SAFETY: the callers' buffers live until this function returns, after the last replay.
            unsafe { stream.replay(&graph)? };
            stream.synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best * 1e6 / LAUNCHES as f64)
    }

    /// Adds a plan's launch.
    fn record<P: Params>(recorder: &mut Recorder, launch: &Launch<P>) -> std::result::Result<(), CudaError> {
        // SAFETY: all callers pass what a plan returned.
        unsafe { recorder.launch(launch) }
    }

    fn product(
        device: &Device,
        stream: &Stream,
        weight_type: WeightType,
        (rows, outputs, inputs): (usize, usize, usize),
    ) -> Result<()> {
        let bytes = Matrix::bytes(weight_type, outputs, inputs).ok_or("a shape")?;
        let copies = (4 * device.info().cache / bytes).clamp(1, LAUNCHES) + 1;
        let weights: Buffer<u8> = device.zeroed(copies * bytes)?;
        let kind = weight_type.activation_type();
        let x = device.upload(&vec![1.0f32; rows * inputs])?;
        let quants = device.zeroed(Activations::quants_len(rows, inputs))?;
        let scales = device.zeroed(Activations::scales_len(kind, rows, inputs))?;
        let sums = device.zeroed(Activations::sums_len(rows, inputs))?;
        let y: Buffer<f32> = device.zeroed(rows * outputs)?;
        let activations = Activations::new(kind, (rows, inputs), (quants.slice(), scales.slice(), sums.slice()))?;
        // SAFETY: the buffers live until the stream is synchronized.
        unsafe { stream.launch(&quantize(x.slice(), &activations)?)? };
        let micros = time(stream, |recorder, i| {
            let at = weights.slice().address() + (i % copies * bytes) as u64;
            let matrix = Matrix::new(weight_type, (1, outputs, inputs), foretoken_gpu::DeviceSlice::new(at, bytes))?;
            record(recorder, &matmul(&matrix, &activations, y.slice())?)
        })?;
        let name = weight_type.name();
        // Two operations per weight and row.
        let operations = (2 * rows * outputs * inputs) as f64;
        println!(
            "{name:5} {outputs:6} x {inputs:5}  rows {rows:3}  {micros:8.1} us  {:7.0} GB/s  {:7.1} TOP/s",
            bytes as f64 / micros / 1e3,
            operations / micros / 1e6
        );
        Ok(())
    }

    /// Weights of bf16.
    fn float_product(device: &Device, stream: &Stream, (rows, outputs, inputs): (usize, usize, usize)) -> Result<()> {
        let bytes = outputs * inputs * ElementType::Bf16.size();
        let copies = (4 * device.info().cache / bytes).clamp(1, LAUNCHES) + 1;
        let weights: Buffer<u8> = device.zeroed(copies * bytes)?;
        let x = device.upload(&vec![1.0f32; rows * inputs])?;
        let y: Buffer<f32> = device.zeroed(rows * outputs)?;
        let micros = time(stream, |recorder, i| {
            let at = weights.slice().address() + (i % copies * bytes) as u64;
            let slice = foretoken_gpu::DeviceSlice::new(at, bytes);
            let matrix = FloatMatrix::new(ElementType::Bf16, (1, outputs, inputs), slice)?;
            record(recorder, &matmul_float::matmul(&matrix, (x.slice(), rows), y.slice())?)
        })?;
        println!(
            "bf16  {outputs:6} x {inputs:5}  rows {rows:3}  {micros:8.1} us  {:7.0} GB/s  {:6.1} TFLOP/s",
            bytes as f64 / micros / 1e3,
            (2 * rows * outputs * inputs) as f64 / micros / 1e6
        );
        Ok(())
    }

    /// The heads of a layer.
    struct Attention {
        heads: usize,
        kv_heads: usize,
        width: usize,
        window: Option<usize>,
    }

    /// A full-attention layer of E4B, and layers of 12B.
    const FULL: Attention = Attention { heads: 8, kv_heads: 2, width: 512, window: None };
    const FULL_12B: Attention = Attention { heads: 16, kv_heads: 1, ..FULL };
    const WINDOW_12B: Attention = Attention { heads: 16, kv_heads: 8, width: 256, window: Some(1024) };

    /// Up to 32 K positions, K and V stay in the cache between launches.
    fn attention(
        device: &Device,
        stream: &Stream,
        &Attention { heads, kv_heads, width, window }: &Attention,
        formats: Option<(CodeFormat, CodeFormat)>,
        (rows, depth): (usize, usize),
    ) -> Result<()> {
        let pages = depth / PAGE_TOKENS + 1;
        let groups = RotationGroups::of(width).ok_or("a width")?;
        let exact_bytes = exact_page_bytes(ElementType::F16, kv_heads, width);
        let mut tables = Vec::new();
        let mut store = |page_bytes: usize| -> Result<(Buffer<u8>, Pages)> {
            let memory: Buffer<u8> = device.zeroed(pages * page_bytes)?;
            let start = tables.len();
            tables.extend((0..pages).map(|page| memory.slice().address() + (page * page_bytes) as u64));
            Ok((memory, Pages::all(start)))
        };
        let (keys, values) = (store(exact_bytes)?, store(exact_bytes)?);
        let layouts = formats.map(|(key, value)| {
            (PageLayout::new(key, Side::Keys, groups), PageLayout::new(value, Side::Values, groups))
        });
        let codes =
            layouts.map(|(k, v)| -> Result<_> { Ok((store(kv_heads * k.bytes())?, store(kv_heads * v.bytes())?)) });
        let codes = codes.transpose()?;
        let tables = device.upload(&tables)?;
        let segment = Segment { tables: tables.slice().address(), rows: rows as i32, ..Segment::default() };
        let segment = device.upload(&[segment])?;
        let places: Vec<[i32; 4]> =
            (0..rows).map(|row| (depth - rows + row) as i32).map(|p| [p, p + 1, 0, 0]).collect();
        let (q, places) = (device.zeroed::<f32>(rows * heads * width)?, device.upload(&places)?);
        let (words, scales) = (device.zeroed::<u32>(q.len() / 4)?, device.zeroed::<f32>(q.len() / 128)?);
        let queries = Queries {
            rows: q.slice(),
            places: places.slice(),
            segments: Segments { slice: segment.slice(), count: 1, longest: rows },
            first: 0,
            count: rows,
            heads,
            kv_heads,
            head_dim: width,
            window,
            zones: formats.map(|_| Zones { head: 64, tail: 512 }),
            split_pages: if window.is_some() { 1 } else { 2 },
        };
        let splits = queries.splits(depth - rows, depth);
        let slots = 2 * splits * rows * heads;
        let (running, output) = (device.zeroed::<[f32; 2]>(slots)?, device.zeroed::<f32>(slots * width)?);
        let room = SplitPartials { softmax: running.slice(), output: output.slice(), splits };
        let y = device.zeroed::<f32>(q.len())?;
        let exact_kv = ExactKv { keys: keys.1, values: values.1, element: ElementType::F16, rotary_channels: width };
        // Every page is in the tables.
        let micros = time(stream, |recorder, _| {
            record(recorder, &exact(&queries, &exact_kv, &room)?)?;
            if let (Some((k, v)), Some((key_layout, value_layout))) = (&codes, layouts) {
                let kv = QuantizedKv {
                    keys: k.1,
                    values: v.1,
                    key_layout,
                    value_layout,
                    query_words: words.slice(),
                    query_scales: scales.slice(),
                };
                record(recorder, &quantized(&queries, &kv, &room)?)?;
            }
            record(recorder, &combine(&queries, &room, Domain::Unrotated, Order::Model, y.slice())?)
        })?;
        let page_bytes = layouts.map_or(2 * exact_bytes, |(k, v)| kv_heads * (k.bytes() + v.bytes()));
        let name = formats.map_or("f16".into(), |(k, v)| format!("{}/{}", k.name(), v.name()));
        let read = window.map_or(pages, |window| pages.min(window / PAGE_TOKENS + 1));
        let rate = (read * page_bytes) as f64 / micros / 1e3;
        // Of a score and of a value; beyond the diagonal as well.
        let operations = (4 * rows * heads * width * window.map_or(depth, |window| window.min(depth))) as f64;
        println!(
            "attention {name:13} heads {heads:2}/{kv_heads} of {width}  depth {depth:6}  rows {rows:3}  {micros:8.1} us  \
             {rate:7.0} GB/s  {:6.1} TFLOP/s",
            operations / micros / 1e6
        );
        Ok(())
    }

    /// A delta net of 35B-A3B (32 heads of values) or 27B (48): the inputs of the recurrence, and the recurrence, which
    /// applies `accepted` rows of the round before.
    fn delta_net(device: &Device, stream: &Stream, heads: usize, (accepted, rows): (usize, usize)) -> Result<()> {
        let (key_heads, width, log_rows) = (16, MAX_KEY_DIM, 16);
        let order = HeadOrder::Grouped;
        let shape = Shape { key_heads, value_heads: heads, key_dim: width, value_dim: width, order, taps: 4, log_rows };
        let floats = |len: usize| device.zeroed::<f32>(len);
        let (matrices, window) = (floats(LAUNCHES * shape.matrices_len())?, floats(LAUNCHES * shape.window_len())?);
        let logs = [floats(LAUNCHES * shape.log_len())?, floats(LAUNCHES * shape.log_len())?];
        let accepted_of = device.upload(&[accepted as u32])?;
        let recurrent = device.upload(&[Recurrent {
            matrices: matrices.slice().address(),
            window: window.slice().address(),
            replayed: logs[0].slice().address(),
            log: logs[1].slice().address(),
            whole: 0,
            accepted: accepted_of.slice().address(),
        }])?;
        let segment = Segment { recurrent: recurrent.slice().address(), rows: rows as i32, ..Segment::default() };
        let (segment, places) = (device.upload(&[segment])?, device.zeroed::<[i32; 4]>(rows)?);
        let (conv, qkv) = (floats(shape.taps * shape.channels())?, floats(rows * shape.channels())?);
        let (gates, of_heads, y) = (floats(rows * heads)?, floats(heads)?, floats(rows * heads * width)?);
        let weights = Weights { conv: conv.slice(), dt_bias: of_heads.slice(), rate: of_heads.slice() };
        let projected = Projected { qkv: qkv.slice(), a: gates.slice(), b: gates.slice() };
        let segments = Segments { slice: segment.slice(), count: 1, longest: rows };
        let layer = |index| Layer { shape, index, layers: LAUNCHES, segments, rows, inputs: None };
        let micros =
            time(stream, |recorder, i| record(recorder, &inputs(&layer(i), places.slice(), &weights, &projected)?))?;
        let recurrence = time(stream, |recorder, i| record(recorder, &delta_rule(&layer(i), y.slice())?))?;
        let rate = (4 * shape.matrices_len()) as f64 / recurrence / 1e3;
        println!(
            "delta net {heads} heads  accepted {accepted:2}  rows {rows:2}  inputs {micros:5.1} us  recurrence \
             {recurrence:5.1} us  {rate:7.0} GB/s"
        );
        Ok(())
    }
}
