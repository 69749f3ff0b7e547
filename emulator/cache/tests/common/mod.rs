//! A machine small enough to check: pages that are remapped, a device that tells it as /dev/ummunotify does, and an
//! adapter that keeps what it pinned. Nothing here is the cache's; the rules are the interface's and the kernel's.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use ummunotify_cache::{Access, Monitor, PageRange, Registrar, RegistrarError};

#[cfg(shuttle)]
pub use shuttle::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
};
#[cfg(not(shuttle))]
pub use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
};

pub const PAGE: u64 = 4096;
/// The address of page 0.
pub const BASE: u64 = 0x7f00_0000_0000;

pub fn range_of(pages: std::ops::Range<u64>) -> PageRange {
    PageRange::new(BASE + pages.start * PAGE, BASE + pages.end * PAGE)
}

#[derive(Debug)]
struct Region {
    range: PageRange,
    queued: bool,
}

#[derive(Debug, Default)]
struct Device {
    regions: BTreeMap<u64, Region>,
    queue: VecDeque<u64>,
    reported: u64,
    /// Invalidations under way, with the regions that were registered or told meanwhile.
    under_way: BTreeMap<u64, (PageRange, BTreeSet<u64>)>,
    next: u64,
}

/// Pages, the device that watches them, and an adapter.
#[derive(Debug)]
pub struct Machine {
    device: Mutex<Device>,
    counter: AtomicU64,
    /// Which memory each page is: the number of times that it was remapped.
    pages: Vec<AtomicU64>,
    adapter: Mutex<BTreeMap<u64, Pinned>>,
    next_pin: AtomicU64,
    /// Refuse to register with this errno, as long as it isn't 0 and that many bytes are pinned.
    pub refuse: AtomicU64,
    pub refuse_from: AtomicU64,
    /// Panic at the next registration, or deregistration.
    pub panic_at_register: AtomicBool,
    pub panic_at_deregister: AtomicBool,
    /// Fail deregistrations, having taken them.
    pub fail_deregister: AtomicBool,
    /// Fail reads of the device with this errno.
    pub device_errno: AtomicU64,
    /// Fail to watch with this errno.
    pub watch_errno: AtomicU64,
    /// Regions that the device has room for; 0 for any number.
    pub room_to_watch: AtomicU64,
    /// The counter moves without anything to tell.
    pub mute: AtomicBool,
}

/// What the adapter keeps: which memory it found behind each page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pinned {
    pub range: PageRange,
    pub access: Access,
    pub versions: Vec<u64>,
}

/// A registration: its number, and what it pinned.
#[derive(Debug)]
pub struct Pin {
    pub number: u64,
    pub pinned: Pinned,
}

impl Machine {
    pub fn new(pages: u64) -> Arc<Self> {
        Arc::new(Self {
            device: Mutex::new(Device::default()),
            counter: AtomicU64::new(0),
            pages: (0..pages).map(|_| AtomicU64::new(0)).collect(),
            adapter: Mutex::new(BTreeMap::new()),
            next_pin: AtomicU64::new(0),
            refuse: AtomicU64::new(0),
            refuse_from: AtomicU64::new(0),
            panic_at_register: AtomicBool::new(false),
            panic_at_deregister: AtomicBool::new(false),
            fail_deregister: AtomicBool::new(false),
            device_errno: AtomicU64::new(0),
            watch_errno: AtomicU64::new(0),
            room_to_watch: AtomicU64::new(0),
            mute: AtomicBool::new(false),
        })
    }

    fn device(&self) -> impl std::ops::DerefMut<Target = Device> + '_ {
        self.device.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn hit(&self, device: &mut Device, range: PageRange, only: Option<&BTreeSet<u64>>) {
        let mut any = false;
        for (&cookie, region) in &mut device.regions {
            if !range.hits(region.range) || only.is_some_and(|only| !only.contains(&cookie)) {
                continue;
            }
            any = true;
            if !region.queued {
                region.queued = true;
                device.queue.push_back(cookie);
            }
        }
        if any {
            self.counter.fetch_add(1, SeqCst);
        }
    }

    /// Other memory comes to these pages: reported before, and after to whoever looked in between.
    pub fn remap(&self, pages: std::ops::Range<u64>) {
        let range = range_of(pages.clone());
        let operation = {
            let mut device = self.device();
            self.hit(&mut device, range, None);
            device.next += 1;
            let operation = device.next;
            device.under_way.insert(operation, (range, BTreeSet::new()));
            operation
        };
        for page in pages {
            self.pages[page as usize].fetch_add(1, SeqCst);
        }
        let mut device = self.device();
        let Some((range, touched)) = device.under_way.remove(&operation) else { return };
        self.hit(&mut device, range, Some(&touched));
    }

    /// Which memory the page is now.
    pub fn version(&self, page: u64) -> u64 {
        self.pages[page as usize].load(SeqCst)
    }

    pub fn versions(&self, range: PageRange) -> Vec<u64> {
        ((range.start - BASE) / PAGE..(range.end - BASE) / PAGE).map(|page| self.version(page)).collect()
    }

    /// What the adapter holds, by number.
    pub fn pinned(&self) -> BTreeMap<u64, Pinned> {
        self.adapter.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    pub fn pinned_bytes(&self) -> u64 {
        self.pinned().values().map(|pinned| pinned.range.len()).sum()
    }

    /// Regions that the device watches.
    pub fn watched(&self) -> usize {
        self.device().regions.len()
    }

    pub fn move_counter(&self) {
        self.counter.fetch_add(1, SeqCst);
    }
}

impl Monitor for Machine {
    fn register(&self, range: PageRange, cookie: u64) -> io::Result<()> {
        match self.watch_errno.load(SeqCst) {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno as i32)),
        }
        let mut device = self.device();
        let room = self.room_to_watch.load(SeqCst);
        if room != 0 && device.regions.len() as u64 >= room {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let before = device.regions.insert(cookie, Region { range, queued: false });
        assert!(before.is_none(), "cookie {cookie:#x} twice");
        for (at, touched) in device.under_way.values_mut() {
            if at.hits(range) {
                touched.insert(cookie);
            }
        }
        Ok(())
    }

    fn unregister(&self, cookie: u64) -> io::Result<()> {
        let mut device = self.device();
        device.queue.retain(|queued| *queued != cookie);
        let gone = device.regions.remove(&cookie);
        assert!(gone.is_some(), "cookie {cookie:#x} isn't registered");
        Ok(())
    }

    fn generation(&self) -> u64 {
        self.counter.load(SeqCst)
    }

    fn events(&self, stale: &mut dyn FnMut(u64)) -> io::Result<Option<u64>> {
        match self.device_errno.load(SeqCst) {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno as i32)),
        }
        let mut device = self.device();
        if self.mute.load(SeqCst) || device.queue.is_empty() && self.generation() == device.reported {
            return Ok(None);
        }
        while let Some(cookie) = device.queue.pop_front() {
            let device = &mut *device;
            if let Some(region) = device.regions.get_mut(&cookie) {
                region.queued = false;
                for (at, touched) in device.under_way.values_mut() {
                    if at.hits(region.range) {
                        touched.insert(cookie);
                    }
                }
            }
            stale(cookie);
        }
        device.reported = self.generation();
        Ok(Some(device.reported))
    }
}

impl Registrar for Machine {
    type Registration = Pin;

    fn register(&self, range: PageRange, access: Access) -> Result<Pin, RegistrarError> {
        assert!(!self.panic_at_register.swap(false, SeqCst), "told to panic at a registration");
        let errno = self.refuse.load(SeqCst);
        if errno != 0 && self.pinned_bytes() + range.len() > self.refuse_from.load(SeqCst) {
            return Err(RegistrarError {
                call: "pin",
                errno: errno as i32,
                range: Some(range),
                advice: "take a bigger machine",
            });
        }
        let pinned = Pinned { range, access, versions: self.versions(range) };
        let number = self.next_pin.fetch_add(1, SeqCst);
        self.adapter.lock().unwrap_or_else(|e| e.into_inner()).insert(number, pinned.clone());
        Ok(Pin { number, pinned })
    }

    fn deregister(&self, pin: Pin) -> Result<(), RegistrarError> {
        let was = self.adapter.lock().unwrap_or_else(|e| e.into_inner()).remove(&pin.number);
        assert_eq!(was.as_ref(), Some(&pin.pinned), "registration {} was given back twice", pin.number);
        assert!(!self.panic_at_deregister.swap(false, SeqCst), "told to panic at a deregistration");
        if self.fail_deregister.load(SeqCst) {
            return Err(RegistrarError { call: "unpin", errno: libc::EBUSY, range: None, advice: "" });
        }
        Ok(())
    }
}
