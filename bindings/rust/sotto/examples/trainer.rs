//! A trainer in one page: linear regression with the optimizer of a DeepSpeed file, on several
//! ranks.
//!
//!     sotto-run -n 4 -- trainer CONFIG.json [RECORDING]
//!
//! Every rank has samples of its own; Sotto averages what they learn from them. With RECORDING the
//! parameters and gradients are those that `bindings/tests/record.c` has written of another
//! trainer to RECORDING.rank<R>. Rank 0 prints a hash of the parameters at the end: equal hashes,
//! equal parameters, bit for bit.

mod recording;

use std::error::Error;

use recording::Recording;
use sotto::{Comm, Optimizer, Param, Reduce};

type Any<T> = Result<T, Box<dyn Error>>;

const INPUTS: usize = 64;
const BATCH: usize = 16; // samples per rank and step
const STEPS: usize = 900;

/// Numbers that follow from a seed: uniform in -1 .. 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// The task: find the weights that made the targets.
fn loss_and_gradient(random: &mut Random, truth: &[f32], w: &[f32], grad: &mut [f32]) -> f64 {
    let mut loss = 0.0;
    grad.fill(0.0);
    for _ in 0..BATCH {
        let x: Vec<f32> = truth.iter().map(|_| random.next()).collect();
        let error: f32 = x.iter().zip(w.iter().zip(truth)).map(|(x, (w, t))| x * (w - t)).sum();
        grad.iter_mut().zip(&x).for_each(|(grad, x)| *grad += error * x / BATCH as f32);
        loss += 0.5 * f64::from(error * error) / BATCH as f64;
    }
    loss
}

fn train(comm: &Comm, config: &str) -> Any<Optimizer> {
    let mut same_everywhere = Random(12345);
    let truth: Vec<f32> = (0..INPUTS).map(|_| 0.1 * same_everywhere.next()).collect();
    let weights = Param::new(vec![0.01f32; INPUTS], vec![0.0f32; INPUTS]).name("weights");
    let mut optimizer = Optimizer::new(comm, config, vec![weights])?;
    let (mut random, mut first) = (Random(u64::from(comm.rank()) + 1), 0.0);
    for step in 0..STEPS {
        let (weights, grad) = optimizer.pair_mut::<f32>(0)?;
        let loss = loss_and_gradient(&mut random, &truth, weights, grad);
        optimizer.step(())?.wait()?;
        if step % 100 == 0 || step + 1 == STEPS {
            let [mean] = comm.all_reduce([loss], Reduce::Mean)?.wait()?;
            if comm.rank() == 0 {
                println!("step {step:3}  loss {mean:.4}");
            }
            first = if step == 0 { mean } else { first };
            if step + 1 == STEPS && mean > 0.2 * first {
                return Err(format!("the loss is {mean}, it was {first}").into());
            }
        }
    }
    Ok(optimizer)
}

fn repeat(comm: &Comm, config: &str, path: &str) -> Any<Optimizer> {
    let mut recording =
        Recording::open(path).map_err(|error| format!("cannot read {path}: {error}"))?;
    let tensors = recording.tensors.drain(..).map(|t| {
        let grad = vec![0.0f32; t.values.len()];
        Param::new(t.values, grad).name(t.name).group(t.group)
    });
    let mut optimizer = Optimizer::new(comm, config, tensors.collect())?;
    while !recording.at_end()? {
        for (_, grad) in optimizer.pairs_mut()? {
            recording.gradient(grad)?;
        }
        optimizer.step(())?.wait()?;
    }
    Ok(optimizer)
}

/// FNV-1a over all parameters.
fn hash(optimizer: &Optimizer) -> sotto::Result<u64> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for index in 0..optimizer.len() {
        for byte in optimizer.param(index)?.iter().flat_map(|value| value.to_ne_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    Ok(hash)
}

fn run() -> Any<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let path = words.first().ok_or("usage: trainer CONFIG.json [RECORDING]")?;
    let config =
        std::fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
    let comm = sotto::init()?;
    let optimizer = match words.get(1) {
        Some(recording) => repeat(&comm, &config, &format!("{recording}.rank{}", comm.rank()))?,
        None => train(&comm, &config)?,
    };
    let (info, hash, sent) = (optimizer.info()?, hash(&optimizer)?, comm.counters()?);
    if comm.rank() == 0 {
        let (bytes, stage) = (sent.payload_bytes_sent, info.stage);
        println!("{} steps, stage {stage}, {bytes} bytes, params_hash {hash:016x}", info.step);
    }
    optimizer.close()?;
    Ok(comm.close()?)
}

fn main() {
    if let Err(error) = run() {
        eprintln!("trainer: {error}");
        std::process::exit(1);
    }
}
