//! Self-attention: see `gemma4::attention`.

use super::workspace::Pass;
use super::{Norm, linear};
use crate::device::{Device, DeviceKv, Input, Matrices, Projection};
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

    /// Reads `normed` of the workspace, writes `branch`. `donor` is the target's layer whose K and V it reads.
    pub(super) fn forward(&self, pass: &Pass<'_>, kv: &DeviceKv, donor: usize) -> Result<()> {
        let Pass { launcher, workspace, placed } = *pass;
        let (rows, rotary) = (placed.positions.rows, placed.rotary(self.attention));
        let x = Input::new(&workspace.quants, workspace.normed.slice(), (rows, self.q_proj.inputs()));
        self.q_proj.multiply(launcher, &x, workspace.q.slice())?;
        if let Some(own) = &self.kv {
            own.k_proj.multiply(launcher, &x, workspace.k.slice())?;
            let mut v = workspace.k.slice();
            if let Some(v_proj) = &own.v_proj {
                v = workspace.v.slice();
                v_proj.multiply(launcher, &x, v)?;
            }
            let k = Projection { x: workspace.k.slice(), norm: own.k_norm.of_heads(), rotary };
            let v = Projection { x: v, norm: own.v_norm.of_heads(), rotary: None };
            kv.append(launcher, donor, (k, v), &placed.positions)?;
        }
        let q = Projection { x: workspace.q.slice(), norm: self.q_norm.of_heads(), rotary };
        kv.attend(
            launcher,
            donor,
            (q, self.heads),
            &placed.positions,
            (&workspace.attention, workspace.attended.slice()),
        )?;
        let attended = Input::new(&workspace.quants, workspace.attended.slice(), (rows, self.o_proj.inputs()));
        self.o_proj.multiply(launcher, &attended, workspace.branch.slice())
    }
}
