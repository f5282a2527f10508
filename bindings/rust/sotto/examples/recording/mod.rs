//! What `bindings/tests/record.c` writes: parameters of a trainer, and its gradients step by
//! step.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

/// One tensor: name, group, values at the start.
pub struct Tensor {
    pub name: String,
    pub group: u32,
    pub values: Vec<f32>,
}

pub struct Recording {
    file: BufReader<File>,
    pub tensors: Vec<Tensor>,
}

impl Recording {
    pub fn open(path: &str) -> io::Result<Recording> {
        let mut file = BufReader::new(File::open(path)?);
        let n = number(&mut file)?;
        let tensors = (0..n).map(|_| tensor(&mut file)).collect::<io::Result<_>>()?;
        Ok(Recording { file, tensors })
    }

    pub fn at_end(&mut self) -> io::Result<bool> {
        Ok(self.file.fill_buf()?.is_empty())
    }

    /// The next gradient: of the first tensor, the second, and so on; then those of the next step.
    pub fn gradient(&mut self, out: &mut [f32]) -> io::Result<()> {
        floats(&mut self.file, out)
    }
}

fn tensor(file: &mut impl Read) -> io::Result<Tensor> {
    let (length, group, count) = (number(file)?, number(file)?, number(file)?);
    let (mut name, mut values) = (vec![0; length], vec![0.0; count]);
    file.read_exact(&mut name)?;
    floats(file, &mut values)?;
    Ok(Tensor { name: String::from_utf8_lossy(&name).into_owned(), group: group as u32, values })
}

fn number(file: &mut impl Read) -> io::Result<usize> {
    let mut bytes = [0; 8];
    file.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes) as usize)
}

fn floats(file: &mut impl Read, out: &mut [f32]) -> io::Result<()> {
    let mut bytes = [0; 4];
    for value in out {
        file.read_exact(&mut bytes)?;
        *value = f32::from_ne_bytes(bytes);
    }
    Ok(())
}
