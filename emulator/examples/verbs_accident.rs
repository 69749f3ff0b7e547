//! The accident of the stale registration, and its cure, on an RDMA adapter (soft-RoCE will do).
//!
//! ```text
//! verbs_accident without [DEVICE]                       the accident: nobody tells the cache
//! ummunotify run -- verbs_accident with [DEVICE] [N]    the cure, N times (20)
//! ummunotify run -- verbs_accident removed [DEVICE]     what is said when the adapter goes while it is in use
//! ```
//!
//! Two processes with a queue pair each. The application keeps its registrations in a cache. Its buffer is unmapped and
//! another mapping comes to the same address between two transfers: one in which the peer writes into the buffer, and
//! one in which the application writes the buffer's contents to the peer. All that is claimed is read back; if it
//! turns out otherwise than the first argument says, the exit code is 1.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ibverbs_sys as ffi;
use ummunotify::cache::soft::Nobody;
use ummunotify::cache::verbs::Verbs;
use ummunotify::cache::{Access, Cache, Limits, Monitor, Registrar};
use ummunotify::client::{Notifier, PageRange};

const PAGE: usize = 4096;
/// Bytes that are sent and shown.
const SHOWN: usize = 16;
const PORT: u8 = 1;
const PATIENCE: Duration = Duration::from_secs(30);

/// A page of anonymous memory, at an address of the kernel's choice or at one that is free.
struct Page(*mut u8);

impl Page {
    fn map(at: Option<u64>) -> Result<Self> {
        let fixed = at.map_or(0, |_| libc::MAP_FIXED_NOREPLACE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
        let hint = at.unwrap_or(0) as *mut libc::c_void;
        // SAFETY: a new mapping that replaces none.
        let page = unsafe { libc::mmap(hint, PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        ensure!(page != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        let page = Self(page.cast());
        ensure!(at.is_none_or(|at| at == page.address()), "mmap gave another address than asked for");
        page.write("");
        Ok(page)
    }

    fn address(&self) -> u64 {
        self.0.addr() as u64
    }

    fn write(&self, text: &str) {
        let mut bytes = [b'.'; SHOWN];
        bytes.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        // SAFETY: mapped as long as self lives; the adapter may write to it at any time, hence volatile.
        unsafe { self.0.cast::<[u8; SHOWN]>().write_volatile(bytes) };
    }

    fn read(&self) -> String {
        // SAFETY: as above.
        String::from_utf8_lossy(&unsafe { self.0.cast::<[u8; SHOWN]>().read_volatile() }).into_owned()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nothing points there but self.
        unsafe { libc::munmap(self.0.cast(), PAGE) };
    }
}

/// How to reach a queue pair: its number, and its port's address.
type Endpoint = (u32, [u8; 16]);

/// A reliable connection.
struct QueuePair {
    qp: *mut ffi::ibv_qp,
    cq: *mut ffi::ibv_cq,
    gid: (u8, [u8; 16]),
}

fn call(what: &'static str, errno: i32) -> Result<()> {
    ensure!(errno == 0, "{what}: {}", std::io::Error::from_raw_os_error(errno));
    Ok(())
}

impl QueuePair {
    fn new(verbs: &Verbs) -> Result<Self> {
        let gid = find_gid(verbs)?;
        // SAFETY: an open device and its protection domain; what is made of them is destroyed before them.
        unsafe {
            let cq = ffi::ibv_create_cq(verbs.context(), 16, null_mut(), null_mut(), 0);
            ensure!(!cq.is_null(), "ibv_create_cq: {}", std::io::Error::last_os_error());
            let mut wanted = ffi::ibv_qp_init_attr {
                send_cq: cq,
                recv_cq: cq,
                cap: ffi::ibv_qp_cap {
                    max_send_wr: 8,
                    max_recv_wr: 8,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: 0,
                },
                qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
                ..Default::default()
            };
            let qp = ffi::ibv_create_qp(verbs.domain(), &mut wanted);
            ensure!(!qp.is_null(), "ibv_create_qp: {}", std::io::Error::last_os_error());
            Ok(Self { qp, cq, gid })
        }
    }

    fn endpoint(&self) -> Endpoint {
        // SAFETY: made by `new`, destroyed by the drop.
        (unsafe { (*self.qp).qp_num }, self.gid.1)
    }

    /// Through the states that ibv_modify_qp(3) lists for a reliable connection.
    fn connect(&self, (number, gid): Endpoint) -> Result<()> {
        use ffi::ibv_qp_attr_mask as mask;
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mut attributes = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
            port_num: PORT,
            qp_access_flags: rights.bits().into(),
            ..Default::default()
        };
        let init =
            mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        self.modify("ibv_modify_qp to INIT", &mut attributes, init)?;

        let mut route = ffi::ibv_ah_attr { is_global: 1, port_num: PORT, ..Default::default() };
        route.grh.dgid = ffi::ibv_gid { raw: gid };
        route.grh.sgid_index = self.gid.0;
        route.grh.hop_limit = 8;
        let mut attributes = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: ffi::IBV_MTU_1024,
            dest_qp_num: number,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            ah_attr: route,
            ..Default::default()
        };
        let receive = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.modify("ibv_modify_qp to RTR", &mut attributes, receive)?;

        let mut attributes = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTS,
            timeout: 18,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 1,
            ..Default::default()
        };
        let send = mask::IBV_QP_STATE
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp to RTS", &mut attributes, send)
    }

    fn modify(
        &self,
        what: &'static str,
        attributes: &mut ffi::ibv_qp_attr,
        mask: ffi::ibv_qp_attr_mask,
    ) -> Result<()> {
        // SAFETY: a live queue pair, and attributes that are read alone.
        call(what, unsafe { ffi::ibv_modify_qp(self.qp, attributes, mask.0 as i32) })
    }

    /// RDMA write of `SHOWN` bytes, to its end.
    fn write(&self, from: u64, local_key: u32, to: u64, remote_key: u32) -> Result<()> {
        let mut piece = ffi::ibv_sge { addr: from, length: SHOWN as u32, lkey: local_key };
        let mut request = ffi::ibv_send_wr {
            wr_id: 1,
            next: null_mut(),
            sg_list: &mut piece,
            num_sge: 1,
            opcode: ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            wr: Default::default(),
            qp_type: Default::default(),
            __bindgen_anon_1: Default::default(),
            __bindgen_anon_2: Default::default(),
        };
        request.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: to, rkey: remote_key };
        let mut refused = null_mut();
        // SAFETY: a live queue pair; request and piece outlive the call, which copies them.
        unsafe {
            let operations = &mut (*(*self.qp).context).ops;
            let post = operations.post_send.context("the device has no post_send")?;
            call("ibv_post_send", post(self.qp, &mut request, &mut refused))?;
        }
        let begin = Instant::now();
        loop {
            let mut done = ffi::ibv_wc::default();
            // SAFETY: a live completion queue, and room for one completion.
            let got = unsafe {
                let poll = (*(*self.cq).context).ops.poll_cq.context("the device has no poll_cq")?;
                poll(self.cq, 1, &mut done)
            };
            ensure!(got >= 0, "ibv_poll_cq failed");
            if got > 0 {
                return match done.error() {
                    None => Ok(()),
                    Some((status, vendor)) => bail!("RDMA write: status {status} (vendor {vendor:#x})"),
                };
            }
            ensure!(begin.elapsed() < PATIENCE, "RDMA write: no completion after {PATIENCE:?}");
            std::thread::yield_now();
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: ours alone.
        unsafe {
            ffi::ibv_destroy_qp(self.qp);
            ffi::ibv_destroy_cq(self.cq);
        }
    }
}

/// The port's first address that is an IPv4 one, else the first that isn't zero, with its number.
fn find_gid(verbs: &Verbs) -> Result<(u8, [u8; 16])> {
    let mut first = None;
    for index in 0..=255u8 {
        let mut gid = ffi::ibv_gid::default();
        // SAFETY: an open device, and room for one address.
        if unsafe { ffi::ibv_query_gid(verbs.context(), PORT, index.into(), &mut gid) } != 0 {
            break;
        }
        // SAFETY: all of its bytes were written.
        let gid = unsafe { gid.raw };
        if gid.starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]) {
            return Ok((index, gid));
        }
        if gid != [0; 16] && first.is_none() {
            first = Some((index, gid));
        }
    }
    first
        .with_context(|| format!("port {PORT} of {} has no address; is its network device up?", verbs.name()))
}

/// The other process: it writes into the application's buffer, and shows what was written into its own.
struct Peer {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Peer {
    fn start(device: &str) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--peer", device]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("start the peer")?;
        let say = child.stdin.take().context("no pipe to the peer")?;
        let hear = BufReader::new(child.stdout.take().context("no pipe from the peer")?);
        Ok(Self { child, say, hear })
    }

    fn ask(&mut self, line: &str) -> Result<String> {
        writeln!(self.say, "{line}").context("write to the peer")?;
        self.hear()
    }

    fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        self.hear.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the peer ended: {}", self.child.wait()?);
        Ok(line.trim_end_matches('\n').to_owned())
    }

    fn finish(self) -> Result<()> {
        let Self { mut child, say, .. } = self;
        drop(say);
        ensure!(child.wait()?.success(), "the peer failed");
        Ok(())
    }
}

fn shown((number, gid): Endpoint) -> String {
    format!("{number} {:x}", u128::from_be_bytes(gid))
}

fn endpoint(line: &str) -> Result<Endpoint> {
    let (number, gid) = line.split_once(' ').with_context(|| format!("no endpoint: {line}"))?;
    Ok((number.parse()?, u128::from_str_radix(gid, 16)?.to_be_bytes()))
}

fn peer(device: &str) -> Result<()> {
    let verbs = Verbs::open(Some(device))?;
    let page = Page::map(None)?;
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = verbs.register(PageRange::new(page.address(), page.address() + PAGE as u64), rights)?;
    let connection = QueuePair::new(&verbs)?;
    println!("{}", shown(connection.endpoint()));
    println!("{} {}", page.address(), region.remote_key());
    for line in std::io::stdin().lines() {
        let line = line?;
        match line.split(' ').collect::<Vec<_>>().as_slice() {
            ["connect", number, gid] => {
                connection.connect(endpoint(&format!("{number} {gid}"))?)?;
                println!("connected");
            }
            ["write", address, key, text] => {
                page.write(text);
                connection.write(page.address(), region.local_key(), address.parse()?, key.parse()?)?;
                println!("written");
            }
            ["read"] => println!("{}", page.read()),
            other => bail!("unknown order {other:?}"),
        }
    }
    drop(connection);
    Ok(verbs.deregister(region)?)
}

/// The application's side: a cache, a connection, and the peer's buffer.
struct Application<M: Monitor> {
    // In the order in which they may be dropped.
    connection: QueuePair,
    peer: Peer,
    there: (u64, u32),
    cache: Cache<M, Verbs>,
}

impl<M: Monitor> Application<M> {
    fn new(monitor: M, device: Option<&str>) -> Result<Self> {
        let verbs = Verbs::open(device)?;
        let connection = QueuePair::new(&verbs)?;
        let mut peer = Peer::start(verbs.name())?;
        let theirs = endpoint(&peer.hear()?)?;
        let line = peer.hear()?;
        let (address, key) = line.split_once(' ').context("no address of the peer's buffer")?;
        let there = (address.parse()?, key.parse()?);
        connection.connect(theirs)?;
        peer.ask(&format!("connect {}", shown(connection.endpoint())))?;
        let cache = Cache::new(monitor, verbs, Limits { entries: 16, bytes: 1 << 20 })?;
        Ok(Self { connection, peer, there, cache })
    }

    /// The peer writes `text` into the buffer; what the application then reads.
    fn receive(&mut self, buffer: &Page, text: &str) -> Result<String> {
        let handle = self.cache.get(buffer.address(), PAGE as u64, Access::REMOTE_WRITE)?;
        let key = handle.registration().remote_key();
        self.peer.ask(&format!("write {} {key} {text}", buffer.address()))?;
        drop(handle);
        Ok(buffer.read())
    }

    /// The application writes what it put into the buffer to the peer; what the peer then reads.
    fn send(&mut self, buffer: &Page, text: &str) -> Result<String> {
        buffer.write(text);
        let handle = self.cache.get(buffer.address(), PAGE as u64, Access::REMOTE_WRITE)?;
        let key = handle.registration().local_key();
        self.connection.write(buffer.address(), key, self.there.0, self.there.1)?;
        drop(handle);
        self.peer.ask("read")
    }

    /// Transfers both ways; unmapping and mapping again; transfers both ways. How many of the latter went wrong.
    fn round(&mut self, round: u32, show: bool) -> Result<u32> {
        let mut wrong = 0;
        // Mapped to the end of the round, so that each direction has an address of its own.
        let mut buffers = Vec::new();
        for direction in ["receive", "send"] {
            let transfer = if direction == "receive" { Self::receive } else { Self::send };
            let (first, second) = (format!("first-{round}"), format!("second-{round}"));
            let buffer = Page::map(None)?;
            let address = buffer.address();
            let got = transfer(self, &buffer, &first)?;
            ensure!(got.starts_with(&first), "{direction}: \"{got}\" already at the first transfer");
            drop(buffer);
            let buffer = Page::map(Some(address))?;
            let got = transfer(self, &buffer, &second)?;
            // And once more, which the cache answers by itself.
            let again = transfer(self, &buffer, &second)?;
            let right = got.starts_with(&second) && again.starts_with(&second);
            buffers.push(buffer);
            wrong += u32::from(!right);
            if show {
                let who =
                    if direction == "receive" { "the application reads" } else { "the peer reads       " };
                println!(
                    "  {direction:<8}{address:#x}: unmapped, mapped again, \"{second}\" sent; {who} \"{got}\"  {}",
                    if right { "right" } else { "WRONG" }
                );
            }
        }
        Ok(wrong)
    }

    fn finish(self) -> Result<()> {
        let statistics = self.cache.statistics();
        println!(
            "  cache: {} hits, {} misses, {} stale entries given back",
            statistics.hits, statistics.misses, statistics.invalidated
        );
        let Self { connection, peer, cache, .. } = self;
        peer.finish()?;
        drop(connection);
        cache.clear()?;
        ensure!(cache.statistics().entries == 0, "registrations are left: {:?}", cache.statistics());
        Ok(())
    }
}

fn without(device: Option<&str>) -> Result<()> {
    println!("A cache that nobody tells anything:");
    let mut application = Application::new(Nobody, device)?;
    let wrong = application.round(1, true)?;
    application.finish()?;
    ensure!(wrong == 2, "the accident didn't happen: {wrong} of 2 transfers went wrong");
    println!("  no error anywhere: the bytes went to, and came from, the page that was unmapped");
    Ok(())
}

fn with(device: Option<&str>, rounds: u32) -> Result<()> {
    let notifier = Notifier::open_nonblocking().context("open /dev/ummunotify")?;
    let backend = notifier.backend().map_or_else(|e| e.to_string(), |backend| format!("{backend:?}"));
    println!("The same cache with /dev/ummunotify ({backend}):");
    let mut application = Application::new(notifier, device)?;
    let mut wrong = 0;
    for round in 1..=rounds {
        wrong += application.round(round, round == 1)?;
    }
    // Of three transfers the third finds its buffer unchanged; moves between the backends make a few miss.
    let hits = application.cache.statistics().hits;
    ensure!(hits >= u64::from(rounds), "of {} repeated transfers {hits} were hits", 2 * rounds);
    application.finish()?;
    println!("  {} transfers after an unmapping, {wrong} wrong", 2 * rounds);
    ensure!(wrong == 0, "{wrong} transfers went wrong");
    Ok(())
}

/// Bad ranges, and an adapter that goes away while it is in use: the errors name call, errno and range, and the
/// cache goes on.
fn removed(device: Option<&str>) -> Result<()> {
    let notifier = Notifier::open_nonblocking().context("open /dev/ummunotify")?;
    let cache = Cache::new(notifier, Verbs::open(device)?, Limits::default())?;
    let refused = |address: u64, length: u64, expect: &[&str]| -> Result<()> {
        match cache.get(address, length, Access::REMOTE_WRITE) {
            Ok(_) => bail!("{length} bytes at {address:#x} were registered"),
            Err(e) => {
                let text = e.to_string();
                println!("  {text}");
                ensure!(expect.iter().all(|word| text.contains(word)), "no {expect:?} in: {text}");
                Ok(())
            }
        }
    };
    let (page, hole) = (Page::map(None)?, Page::map(None)?.address());
    let kept = cache.get(page.address(), PAGE as u64, Access::REMOTE_WRITE)?;
    refused(hole, PAGE as u64, &["ibv_reg_mr", "Bad address", &format!("{hole:#x}"), "mapped"])?;
    // SAFETY: a question. The superuser isn't bound by the limit.
    if unsafe { libc::geteuid() } == 0 {
        println!("  not tried as root: the limit on locked memory");
    } else {
        let limit = libc::rlimit { rlim_cur: 1 << 16, rlim_max: 1 << 16 };
        // SAFETY: lowers a limit of this process, from a value on the stack.
        ensure!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) } == 0, "setrlimit");
        let large = vec![1u8; 1 << 20];
        refused(large.as_ptr() as u64, 1 << 20, &["ibv_reg_mr", "ulimit -l"])?;
    }
    ensure!(kept.is_current() && cache.statistics().entries == 1, "{:?}", cache.statistics());

    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    // Some kernels take the adapter away from its users, others let it go only after the last of them.
    let other = Page::map(None)?;
    match cache.get(other.address(), PAGE as u64, Access::REMOTE_WRITE) {
        Ok(_) => println!("  this kernel keeps the adapter for its users"),
        Err(_) => refused(other.address(), PAGE as u64, &["ibv_reg_mr", "the adapter is gone"])?,
    }
    drop(kept);
    drop(page);
    cache.clear()?;
    let statistics = cache.statistics();
    ensure!((statistics.entries, statistics.bytes) == (0, 0), "{statistics:?}");
    println!(
        "  the cache is empty and consistent; {} of 1 registrations couldn't be given back",
        statistics.deregistration_failures
    );
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["--peer", device] => peer(device),
        ["without"] => without(None),
        ["without", device] => without(Some(device)),
        ["with"] => with(None, 20),
        ["with", device] => with(Some(device), 20),
        ["with", device, rounds] => with(Some(device), rounds.parse().context("a number of rounds")?),
        ["removed"] => removed(None),
        ["removed", device] => removed(Some(device)),
        _ => bail!("usage: verbs_accident without|with|removed [DEVICE] [ROUNDS]"),
    }
}
