//! Self-attention: see `gemma4::attention`.

use super::layer::Pass;
use super::{Norm, linear};
use crate::device::{Device, DeviceKv, Input, Matrices, Shaped};
use crate::gemma4::attention::Attention;
use crate::gemma4::{AttentionType, LayerConfig};
use crate::{Error, Result};

pub(super) struct DeviceAttention {
    attention: AttentionType,
    heads: usize,
    q_proj: Matrices,
    q_norm: Norm,
    kv: Option<KeysValues>,
    o_proj: Matrices,
}

struct KeysValues {
    k_proj: Matrices,
    v_proj: Option<Matrices>,
    k_norm: Norm,
    v_norm: Norm,
}

impl DeviceAttention {
    pub(super) fn upload(device: &dyn Device, name: &str, layer: &LayerConfig, from: &Attention) -> Result<Self> {
        if !matches!(layer.head_dim, 64 | 128 | 256 | 512) {
            let problem = format!("heads of {}; the kernels have 64, 128, 256 and 512", layer.head_dim);
            let problem = format!("tensor {name}q_proj.weight: {problem}; use the CPU");
            return Err(Error::Device { device: device.name(), problem });
        }
        let kv = from.kv.as_ref().map(|own| -> Result<_> {
            let v_proj = own.v_proj.as_ref().map(|v_proj| linear(device, &format!("{name}v_proj"), v_proj));
            Ok(KeysValues {
                k_proj: linear(device, &format!("{name}k_proj"), &own.k_proj)?,
                v_proj: v_proj.transpose()?,
                k_norm: Norm::upload(device, &own.k_norm)?,
                v_norm: Norm::upload(device, &own.v_norm)?,
            })
        });
        let q_proj = linear(device, &format!("{name}q_proj"), &from.q_proj)?;
        Ok(Self {
            attention: from.attention,
            heads: q_proj.outputs() / layer.head_dim,
            q_proj,
            q_norm: Norm::upload(device, &from.q_norm)?,
            kv: kv.transpose()?,
            o_proj: linear(device, &format!("{name}o_proj"), &from.o_proj)?,
        })
    }

    /// From the room's `normed` to its `branch`. `donor` is the target's layer whose K and V it reads.
    pub(super) fn forward(&self, pass: &Pass<'_>, kv: &DeviceKv, donor: usize) -> Result<()> {
        let Pass { work, room, placed } = *pass;
        let (rows, rotary) = (placed.standing.rows, placed.rotary(self.attention));
        let x = Input::new(&room.quants, room.normed.span(), (rows, self.q_proj.inputs()));
        self.q_proj.multiply(work, &x, room.q.span())?;
        if let Some(own) = &self.kv {
            own.k_proj.multiply(work, &x, room.k.span())?;
            let mut v = room.k.span();
            if let Some(v_proj) = &own.v_proj {
                v = room.v.span();
                v_proj.multiply(work, &x, v)?;
            }
            let k = Shaped { x: room.k.span(), norm: own.k_norm.of_heads(), rotary };
            let v = Shaped { x: v, norm: own.v_norm.of_heads(), rotary: None };
            kv.append(work, donor, (k, v), &placed.standing)?;
        }
        let q = Shaped { x: room.q.span(), norm: self.q_norm.of_heads(), rotary };
        kv.attend(work, donor, (q, self.heads), &placed.standing, (&room.attention, room.attended.span()))?;
        let attended = Input::new(&room.quants, room.attended.span(), (rows, self.o_proj.inputs()));
        self.o_proj.multiply(work, &attended, room.branch.span())
    }
}
